"""GP, second half: the personalisation phase. Every host fine-tunes its own copy of the global model on its own partition,

    L(W) + lambda ||W - W_g||^2,   W_g = the global model, frozen,

and waits for nobody: before its first step a host pulls all it can ever need, then it leaves DistDGL for good.

    python personalize.py --ip_config ip_config.txt --part_config out/parts/debian.json --out out    (on every host)
    python personalize.py --report --out out                                                       (once, at the end)

Reads   out/global.pt and the partition directory.
Writes  out/host{i}.pt (weights, per-class counts, epochs); the report: out/summary.json and its table.
"""
import json
import sys
import time
from pathlib import Path

import dgl
import torch

import sampler
from train_dist import (SAGE, Host, arguments, check, check_files, class_counts, connect, disconnect, epoch_row,
                        f1_scores, fail, full_block, guarded, save, say, show, sync_epochs, train_epoch)

# n own nodes of the host, M nodes of its local graph (own first), F features, C classes, L layers


def proximal(parameters, anchors, lambda_):
    """lambda ||W - W_g||^2, the distance of Ditto (arXiv 2012.04221). Two lists of tensors of equal shapes -> ()"""
    return lambda_ * sum(((w - w_g) ** 2).sum() for w, w_g in zip(parameters, anchors))


class LocalGraph:
    """All of the graph that an L-layer model on this host's own nodes can see: the in-edges of all nodes within L-1 hops and
    the features of all within L. Pulled from DistDGL once; a plain DGLGraph from then on. Nodes are ordered by hop."""

    def __init__(self, host, num_layers):
        nodes, self.reach = host.inner, [host.num_inner]            # reach[k]: how many nodes lie within k hops
        frontier, edges = nodes, []                                  # in global ids
        for _ in range(num_layers):
            # -1: all in-edges. dgl.distributed.in_subgraph, the obvious call, fails on remote nodes in DGL 2.1.0
            edges.append(torch.stack(dgl.distributed.sample_neighbors(host.g, frontier, -1).edges()))
            new = edges[-1][0].unique()
            frontier = new[~torch.isin(new, nodes)]
            nodes = torch.cat([nodes, frontier])
            self.reach.append(len(nodes))
        local = torch.empty(host.g.num_nodes(), dtype=torch.int64)
        local[nodes] = torch.arange(len(nodes))
        self.graph = dgl.graph(tuple(local[torch.cat(edges, 1)]), num_nodes=len(nodes)).formats("csc")
        self.feat, self.label = host.feat[nodes], host.inner_label  # (M, F), (n,) or (n, C)

    @torch.no_grad()
    def inference(self, model):
        """Exact logits (n, C) of the host's own nodes by its own model: equal to running the model on the whole graph. Each
        layer is computed for one hop less than the one before; no activation of another host's model enters."""
        indptr, indices, _ = self.graph.adj_tensors("csc")
        model.eval()
        h = self.feat
        for i, reach in enumerate(reversed(self.reach[:-1])):
            h = model.layer(i, full_block(indptr, indices, len(h), reach), h)
        model.train()
        return h


def personalize(args, state, host, p):
    """The personalisation phase of one host. No barrier, no collective and no message from here on.
    state: global.pt. Selection by the host's own validation micro-F1; the global model stays where that does not rise.
    -> what host{i}.pt holds"""
    part_id, masks, own = int(host.part_id), host.masks, torch.arange(host.num_inner)
    torch.manual_seed(args.seed * 9973 + part_id)
    dgl.seed(args.seed * 9973 + part_id)                            # DGL returns even all in-edges in random order
    local, entropy = LocalGraph(host, args.num_layers), entropy_of(args, part_id)
    del host.g, host.feat, host.label
    disconnect()                                                    # the last time that hosts wait for each other

    model = SAGE(**state["shape"])
    model.load_state_dict(state["model"])
    anchors = [w.detach().clone() for w in model.parameters()]
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)

    def counts(*splits):
        logits = local.inference(model)
        return {s: class_counts(logits[masks[s]], local.label[masks[s]]) for s in splits}

    def weights():
        return {k: v.clone() for k, v in model.state_dict().items()}

    best, rows, seconds = dict(epoch=0, model=weights(), val=f1_scores(counts("val")["val"])), [], 0.0
    sizes, steps = sampler.mini_epoch_sizes([int(masks["train"].sum())], args.epoch_fraction, args.batch_size)
    for epoch in range(1, args.num_epochs - sync_epochs(args) + 1 if sizes[0] else 1):
        tic = time.time()
        rng = sampler.generator(args.seed, part_id, state["last"]["epoch"] + epoch)
        seed_batches = sampler.batches(own[masks["train"]], p, sizes, steps, 0, rng)
        loss, count = train_epoch(model, optimizer, local.graph, local.feat, local.label, seed_batches, args.fan_out,
                                  args.gamma, lambda: proximal(model.parameters(), anchors, vars(args)["lambda"]))
        schedule.step()
        seconds += (took := time.time() - tic)
        val = f1_scores(counts("val")["val"])
        rows.append(epoch_row("personalise", part_id, epoch, loss, val, seconds, count / took))
        if val["micro"] > best["val"]["micro"]:
            best = dict(epoch=epoch, model=weights(), val=val)
        if epoch - best["epoch"] >= args.patience:
            break

    model.load_state_dict(best["model"])
    personal = counts("val", "test")
    model.load_state_dict(state["model"])
    return dict(best, host=part_id, counts={"global": counts("val", "test"), "personal": personal}, rows=rows,
                seconds=seconds, train_nodes=int(masks["train"].sum()), entropy=entropy, ended=time.time())


def entropy_of(args, part_id):
    """The label entropy of the host's training nodes as partition.py measured it, None in a directory of DGL's own tools."""
    stats = args.part_config.parent / "stats.json"
    return json.loads(stats.read_text())["parts"][part_id]["entropy"] if stats.exists() else None


def report(out):
    """Sums the counts that the hosts left behind, computes every score once, writes summary.json and prints it.
    -> the hosts whose host{i}.pt is missing; the scores are then those of the others"""
    try:
        config, state = json.loads((out / "config.json").read_text()), torch.load(out / "global.pt")
        rows = [line for line in (out / "metrics.jsonl").read_text().splitlines()
                if json.loads(line)["phase"] == "generalise"]
        paths = {i: out / f"host{i}.pt" for i in range(config["world_size"])}
        hosts = [torch.load(path) for path in paths.values() if path.exists()]
    except Exception as e:                                          # a file missing, truncated or of something else
        reason = str(e).splitlines()[0] if str(e) else type(e).__name__
        fail(f"--out {out} is not of a finished run ({reason}); run ./launch.sh")
    if "test" not in state:
        fail(f"--out {out}/global.pt is of an unfinished generalisation phase; run ./launch.sh")
    missing = [i for i, path in paths.items() if not path.exists()]
    if not hosts:
        fail(f"--out {out} holds no host's result (host0.pt, ...); run the personalisation first")

    rows += [json.dumps(row) for h in hosts for row in h["rows"]]
    (out / "metrics.jsonl").write_text("\n".join(rows) + "\n")

    def scores(hosts):
        return {model: {split: f1_scores(sum(h["counts"][model][split] for h in hosts)) for split in ("val", "test")}
                for model in ("global", "personal")}

    seconds = dict(phase1=state["seconds"], phase2=max(h["seconds"] for h in hosts), 
                   wall=max(h["ended"] for h in hosts) - config["started"])
    per_host = [{**{k: h[k] for k in ("host", "entropy", "train_nodes", "epoch", "seconds")}, **scores([h])} for h in hosts]
    summary = dict(scores(hosts), seconds=seconds, hosts=per_host, missing=missing, config=config)
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")

    row = "{:>5} {:>13} {:>12} {:>8} {:>22} {:>22}"
    say(row.format("host", "entropy/bits", "train nodes", "seconds", "test micro-F1 global", "personal"))
    for h in per_host:
        entropy = "-" if h["entropy"] is None else f"{h['entropy']:.3f}"
        micro = (f"{h[model]['test']['micro']:.4f}" for model in ("global", "personal"))
        say(row.format(h["host"], entropy, h["train_nodes"], f"{h['seconds']:.1f}", *micro))
    for model, name in (("global", "global model"), ("personal", "personal models")):
        say(f"{name:>15}, all test nodes: {show(summary[model]['test'])}")
    say(f"seconds of training: generalisation {seconds['phase1']:.1f}, personalisation {seconds['phase2']:.1f} "
        f"(slowest host); of everything: {seconds['wall']:.0f}")
    if missing:
        say(f"PARTIAL: no result of host(s) {', '.join(map(str, missing))}; the scores are those of the other hosts")
    return missing


def main(args):
    if not (args.out / "global.pt").exists():
        fail(f"--out {args.out} holds no global.pt; run train_dist.py first")
    check_files(args)
    state = torch.load(args.out / "global.pt")
    if args.num_layers != (layers := state["shape"]["num_layers"]):
        fail(f"--num_layers {args.num_layers}: {args.out}/global.pt has {layers}")
    host = Host(connect(args))
    result = personalize(args, state, host, host.cbs_probabilities() if args.sampler == "cbs" else None)
    save(args.out / f"host{result['host']}.pt", result)


if __name__ == "__main__":
    parser = arguments()
    parser.add_argument("--report", action="store_true", help="sum up what the hosts left in --out")
    args = check(parser.parse_args())
    if args.report:
        sys.exit(3 if report(args.out) else 0)
    guarded(main, args)
