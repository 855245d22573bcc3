"""GP, first half: the generalisation phase. All hosts train one global model synchronously (DDP) on DistDGL.

Started on every host, as servers and as trainers, by launch.sh or by DGL's tools/launch.py:

    python train_dist.py --ip_config ip_config.txt --part_config out/parts/debian.json --out out

Each host draws batches from the training nodes of its own partition (sampler.py) and samples their neighbours, local and
remote, through DistDGL.
Reads   a DistDGL partition directory, of partition.py or of DGL's own tools.
Writes  out/global.pt (weights of the epoch with the best validation micro-F1, and the last state to go on from),
        out/metrics.jsonl (a line per epoch), out/config.json.
"""
import argparse
import collections
import contextlib
import json
import os
import resource
import subprocess
import sys
import time
import traceback
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")
import dgl
import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import sampler

# N nodes, F features, C classes, P hosts, B seeds of a batch; a block maps its source nodes to its first, destination nodes


class SAGE(nn.Module):
    """GraphSAGE with mean aggregator: num_layers of dgl.nn.SAGEConv, ReLU and dropout between them."""

    def __init__(self, in_feats, num_hidden, num_classes, num_layers, dropout):
        super().__init__()
        sizes = [in_feats] + [num_hidden] * (num_layers - 1) + [num_classes]
        self.layers = nn.ModuleList(dgl.nn.SAGEConv(a, b, "mean") for a, b in zip(sizes, sizes[1:]))
        self.dropout = nn.Dropout(dropout)

    def layer(self, i, block, h):
        """Layer i alone. h (sources, .) -> (destinations, .)"""
        h = self.layers[i](block, h)
        return h if i == len(self.layers) - 1 else self.dropout(F.relu(h))

    def forward(self, blocks, h):
        """blocks, one a layer, from dgl.dataloading.NeighborSampler; h (input nodes, F) -> logits (B, C)"""
        for i, block in enumerate(blocks):
            h = self.layer(i, block, h)
        return h


def focal_loss(logits, label, gamma=0.0):
    """sum over the batch of sum_c -(1 - p_c)^gamma y_c log p_c; gamma = 0 is cross-entropy. Multi-label: the binary form,
    p_c of "has c" and of "has not c" alike. logits (B, C), label (B,) or (B, C) 0/1 -> ()"""
    if label.dim() == 1:
        log_p = F.log_softmax(logits, 1).gather(1, label[:, None])                         # (B, 1)
    else:
        log_p = F.logsigmoid(torch.where(label.bool(), logits, -logits))                   # (B, C)
    if gamma == 0:
        return -log_p.sum()
    one_minus_p = (-torch.expm1(log_p)).clamp(min=1e-12)            # 0^gamma has no gradient at gamma < 1
    return -(one_minus_p ** gamma * log_p).sum()


def class_counts(logits, label):
    """True positives, false positives and false negatives of each class. Multi-label: a label is predicted at p > 1/2.
    logits (n, C), label (n,) or (n, C) -> (3, C) int64; counts of several hosts add up"""
    num_classes = logits.shape[1]
    if label.dim() == 1:
        pred = logits.argmax(1)
        tp, predicted, true = (torch.bincount(c, minlength=num_classes) for c in (pred[pred == label], pred, label))
    else:
        pred, label = logits > 0, label.bool()
        tp, predicted, true = ((a & b).sum(0) for a, b in ((pred, label), (pred, pred), (label, label)))
    return torch.stack([tp, predicted - tp, true - tp])


def f1_scores(counts):
    """Micro-, macro- and weighted F1 from the counts over all hosts. F1_c = 2 tp / (2 tp + fp + fn); macro is the mean over
    the classes that occur, as truth or as prediction, weighted the mean by true count. counts (3, C) -> dict of floats"""
    def f1(tp, fp, fn):
        return 2 * tp / (2 * tp + fp + fn).clamp(min=1)

    counts = counts.double()
    occurs, true = counts.sum(0) > 0, counts[0] + counts[2]
    per_class = f1(*counts)
    return dict(micro=float(f1(*counts.sum(1))), macro=float(per_class[occurs].sum() / max(1, int(occurs.sum()))),
                weighted=float((per_class * true).sum() / true.sum().clamp(min=1)))


def full_block(indptr, indices, num_src, num_dst):
    """The block of all in-edges of nodes 0..num_dst-1 from a graph in CSC form, for inference without sampling."""
    in_edges = (indptr[:num_dst + 1], indices[:int(indptr[num_dst])], [])
    return dgl.create_block(("csc", in_edges), num_src_nodes=num_src, num_dst_nodes=num_dst)


class Host:
    """This host's partition: its own ("inner") nodes come first, then the halo, the remote sources of their in-edges."""

    def __init__(self, g):
        self.g, part = g, g.local_partition
        self.nodes = part.ndata[dgl.NID]                                                   # global ids
        self.num_inner = int(part.ndata["inner_node"].sum())
        self.inner, self.halo = self.nodes[:self.num_inner], self.nodes[self.num_inner:]
        self.indptr, self.indices, _ = part.adj_tensors("csc")
        self.part_id = g.get_partition_book().partid
        self.feat = g.ndata["feat" if "feat" in g.ndata else "features"]                   # DistTensor (N, F)
        self.label = g.ndata["label" if "label" in g.ndata else "labels"]                  # DistTensor (N,) or (N, C)
        self.inner_label = self.label[self.inner].long()
        self.masks = {k: g.ndata[f"{k}_mask"][self.inner].bool() for k in ("train", "val", "test")}
        self.train_nodes = self.inner[self.masks["train"]]

    def cbs_probabilities(self):
        """p(v) of this host's training nodes: all their in-edges are local, only the halo's degrees are pulled."""
        rows = self.masks["train"].nonzero().flatten()
        degree = torch.cat([self.indptr.diff()[:self.num_inner], self.g.in_degrees(self.halo)])
        dst = torch.repeat_interleave(torch.arange(self.num_inner), degree[:self.num_inner])
        norm = sampler.column_norms(self.indices[:len(dst)], dst, degree, self.num_inner)
        return sampler.cbs_probabilities(norm[rows], self.inner_label[rows])


class Inference:
    """Exact layer-wise inference over all nodes of the graph: every host computes its own nodes from all their
    neighbours, labelled or not, and after each layer but the last publishes the activations for the others' halos.
    Between two calls there must be a collective, or a fast host overwrites what a slow one still reads."""

    def __init__(self, host, num_hidden, num_layers):
        self.host = host
        self.block = full_block(host.indptr, host.indices, len(host.nodes), host.num_inner)
        self.feat = host.feat[host.nodes]                                                  # constant, so pulled once
        policy = host.g.get_node_partition_policy("_N")             # DGL guesses it from the shape, wrongly if E = N
        self.hidden = [dgl.distributed.DistTensor((host.g.num_nodes(), num_hidden), torch.float32, f"hidden{i}",
                                                  part_policy=policy) for i in range(num_layers - 1)]

    @torch.no_grad()
    def __call__(self, model):
        """-> logits (inner nodes, C) of this host"""
        host = self.host
        model.eval()
        h = model.layer(0, self.block, self.feat)
        for i, hidden in enumerate(self.hidden, 1):
            hidden[host.inner] = h
            host.g.barrier()
            h = model.layer(i, self.block, torch.cat([h, hidden[host.halo]]))
        model.train()
        return h


def train_epoch(model, optimizer, g, feat, label, seed_batches, fan_out, gamma, penalty=None):
    """One mini-epoch; g a DistGraph or a DGLGraph, feat and label indexable by its node ids, seed_batches from
    sampler.batches. penalty() is added to the loss of each step. -> loss per seed of this host, seeds"""
    neighbours = dgl.dataloading.NeighborSampler(fan_out)
    total, count = 0.0, 0
    for seeds, share in seed_batches:
        if len(seeds):
            input_nodes, seeds, blocks = neighbours.sample_blocks(g, seeds)
            loss = focal_loss(model(blocks, feat[input_nodes]), label[seeds].long(), gamma)
            total, count = total + float(loss), count + len(seeds)
            loss = loss / share
        else:           # a host with no nodes left still takes part in the gradient average
            empty = dgl.create_block(([], []), num_src_nodes=0, num_dst_nodes=0)
            loss = model([empty] * len(fan_out), feat[torch.arange(0)]).sum()
        optimizer.zero_grad()
        (loss if penalty is None else loss + penalty()).backward()
        optimizer.step()
    return total / max(1, count), count


def train(args, g):
    """The generalisation phase. Early stopping and selection by validation micro-F1 over all hosts."""
    host, rank, world = Host(g), dist.get_rank(), dist.get_world_size()
    num_train = [None] * world
    dist.all_gather_object(num_train, len(host.train_nodes))
    sizes, steps = sampler.mini_epoch_sizes(num_train, args.epoch_fraction, args.batch_size)
    p = host.cbs_probabilities() if args.sampler == "cbs" else None
    label = host.inner_label
    num_classes = torch.tensor(int(label.max()) + 1 if label.dim() == 1 else label.shape[1])
    dist.all_reduce(num_classes, dist.ReduceOp.MAX)

    torch.manual_seed(args.seed)                                    # the same initial weights everywhere
    shape = dict(in_feats=host.feat.shape[1], num_hidden=args.num_hidden, num_classes=int(num_classes),
                 num_layers=args.num_layers, dropout=args.dropout)
    model = nn.parallel.DistributedDataParallel(SAGE(**shape))
    torch.manual_seed(args.seed * 9973 + rank)                      # other dropout and
    dgl.seed(args.seed * 9973 + rank)                               # other neighbours on each host
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)  # the authors' schedule
    inference = Inference(host, args.num_hidden, args.num_layers)

    def scores(split):
        mask = host.masks[split]
        counts = class_counts(inference(model.module)[mask], host.inner_label[mask])
        dist.all_reduce(counts)
        return f1_scores(counts)

    best, seconds, num_epochs = None, 0.0, sync_epochs(args)
    for epoch in range(1, num_epochs + 1):
        dist.barrier()
        tic = time.time()
        rng = sampler.generator(args.seed, rank, epoch)
        seed_batches = sampler.batches(host.train_nodes, p, sizes, steps, rank, rng)
        loss, _ = train_epoch(model, optimizer, g, host.feat, host.label, seed_batches, args.fan_out, args.gamma)
        schedule.step()
        loss = torch.tensor([loss * int(sizes[rank])])
        dist.all_reduce(loss)                                       # the slowest host ends the epoch
        seconds += (took := time.time() - tic)
        val = scores("val")
        if best is None or val["micro"] > best["val"]["micro"]:
            best = dict(epoch=epoch, val=val, seconds=seconds,
                        model={k: v.clone() for k, v in model.module.state_dict().items()})
        if rank == 0:
            row = epoch_row("generalise", "all", epoch, float(loss) / sum(sizes), val, seconds, sum(sizes) / took)
            with open(args.out / "metrics.jsonl", "a") as f:
                f.write(json.dumps(row) + "\n")
            last = dict(epoch=epoch, model=model.module.state_dict(), optimizer=optimizer.state_dict(),
                        schedule=schedule.state_dict())
            save(args.out / "global.pt", dict(best, shape=shape, last=last))
        if epoch - best["epoch"] >= args.patience:
            break

    model.module.load_state_dict(best["model"])
    test = scores("test")                                           # test labels are read here, once
    if rank == 0:
        say(f"global model of epoch {best['epoch']}: test {show(test)}, {seconds:.1f} s of training")
        state = torch.load(args.out / "global.pt")
        save(args.out / "global.pt", dict(state, test=test, seconds=seconds))


# What follows is for the operator: arguments, start-up, files.

def sync_epochs(args):
    return max(1, round(args.num_epochs * args.sync_fraction))


def say(text, file=None):
    """One write per line, so that the lines of several hosts do not mix."""
    file = file or sys.stdout
    file.write(text + "\n")
    file.flush()


def fail(message):
    say(f"{Path(sys.argv[0]).name}: {message}", sys.stderr)
    sys.exit(2)


def show(scores):
    return ", ".join(f"{k}-F1 {v:.4f}" for k, v in scores.items())


def epoch_row(phase, host, epoch, loss, val, seconds, samples_per_second):
    """A line of metrics.jsonl, also said on the screen. seconds: of training so far, evaluation not counted."""
    say(f"{phase} host {host:>3} epoch {epoch:3d}: loss {loss:.4f}, val {show(val)}, {seconds:6.1f} s, "
        f"{samples_per_second:.0f} samples/s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return dict(phase=phase, host=host, epoch=epoch, loss=loss, val=val, seconds=seconds,
                samples_per_second=samples_per_second, peak_memory_gb=peak)


def save(path, state):
    """Whole or not at all, also when the process dies meanwhile."""
    torch.save(state, path.with_suffix(".tmp"))
    path.with_suffix(".tmp").replace(path)


def arguments():
    """The flags of both phases, DGL's names where DGL has them; -> argparse.ArgumentParser"""
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    add = p.add_argument
    add("--ip_config", type=Path, help="a line per host: ip [port]")
    add("--part_config", type=Path, help="the partition directory's NAME.json")
    add("--graph_name", help="if not the one in part_config")
    add("--out", type=Path, default="out", help="where the results go, the same on every host")
    add("--sampler", choices=("cbs", "uniform"), default="cbs", help="how training nodes are drawn")
    add("--epoch_fraction", type=float, help="training nodes per epoch (cbs 1/3, uniform 1)")
    add("--num_epochs", type=int, default=100, help="of both phases together")
    add("--sync_fraction", type=float, default=0.34, help="the generalisation phase's share of them")
    add("--patience", type=int, default=15, help="a phase ends so many epochs after its best validation micro-F1")
    add("--num_hidden", type=int, default=256)
    add("--num_layers", type=int, default=2)
    add("--fan_out", default="25,25", help="neighbours sampled per layer, -1 for all")
    add("--batch_size", type=int, default=1000, help="per host")
    add("--lr", type=float, default=0.01)
    add("--dropout", type=float, default=0.5)
    add("--gamma", type=float, default=0.0, help="of the focal loss; 0 is cross-entropy")
    add("--lambda", type=float, default=1e-5, help="pull of the global model in personalisation")
    add("--seed", type=int, default=0)
    p.error = fail
    return p


def check(args):
    """What argparse can't: ranges, and flags that depend on others."""
    if args.epoch_fraction is None:
        args.epoch_fraction = 1 / 3 if args.sampler == "cbs" else 1.0
    for low, high, names in ((1, 1e6, "num_epochs patience num_hidden num_layers batch_size"), (0, 2e5, "seed"),
                             (1e-12, 1, "epoch_fraction sync_fraction"), (1e-12, 1e6, "lr"), (0, 0.99, "dropout"),
                             (0, 100, "gamma"), (0, 1e12, "lambda")):
        for k in names.split():
            if not low <= (value := getattr(args, k)) <= high:
                fail(f"argument --{k}: {value} must be at least {low:g} and at most {high:g}")
    try:
        fan_out = [int(f) for f in args.fan_out.split(",")]
    except ValueError:
        fan_out = [0]
    if len(fan_out) != args.num_layers or not all(0 < f < 1e6 or f == -1 for f in fan_out):
        fail(f"argument --fan_out: {args.fan_out} must be --num_layers {args.num_layers} numbers, such as 25,25 for 2")
    args.fan_out = fan_out
    return args


def check_files(args):
    """What only a running job needs: the two files, and an environment from a launcher."""
    if "DGL_DIST_MODE" not in os.environ and "DGL_ROLE" not in os.environ:
        fail("this is one process of a DistDGL job; start all of them with ./launch.sh")
    for name in ("ip_config", "part_config"):
        path = getattr(args, name)
        if not path or not path.is_file():
            fail(f"--{name} {path}: no such file; start with ./launch.sh, or with DGL's tools/launch.py")
    try:
        book = json.loads(args.part_config.read_text())
        args.graph_name, parts = args.graph_name or book["graph_name"], book["num_parts"]
    except (ValueError, KeyError):
        fail(f"--part_config {args.part_config} is not a DistDGL partition file; partition.py writes one")
    hosts = len(args.ip_config.read_text().splitlines())
    if hosts != parts:
        fail(f"--ip_config {args.ip_config} has {hosts} lines, the graph {parts} parts; partition it into {hosts}")


def share_machine(host, port):
    """Lets several DistDGL hosts live on one machine, which DistDGL does not foresee: each would take itself for the first
    line of ip_config that has a local address, and all would write their rows into shared memory under the same names.
    port: this host's in ip_config, unique on the machine."""
    from dgl.distributed import dist_graph, graph_partition_book, kvstore, rpc_client

    def rename(owner, function, position):
        original = getattr(owner, function)

        def renamed(*args):
            return original(*args[:position], f"{args[position]}.{port}.", *args[position + 1:])
        setattr(owner, function, renamed)

    rename(kvstore, "empty_shared_mem", 0)
    rename(dist_graph, "_copy_graph_to_shared_mem", 1)
    rename(dist_graph, "_get_graph_from_shared_mem", 0)
    rename(dist_graph, "get_shared_mem_partition_book", 0)
    rename(graph_partition_book.RangePartitionBook, "shared_memory", 1)
    rpc_client.get_local_machine_id = lambda _: host


def seed_servers(seed):
    """Makes remote neighbours follow from the seed. A server draws them for whoever asks first; so it seeds itself anew for
    each request, by the nodes asked for and by how often just these have been asked for."""
    from dgl.distributed.graph_services import SamplingRequest
    process, asked = SamplingRequest.process_request, collections.Counter()

    def process_seeded(request, server_state):
        nodes = int(request.seed_nodes.sum())
        asked[nodes] += 1
        dgl.seed(hash((seed, nodes, asked[nodes])) % 2**31)         # of integers, so the same in every process
        return process(request, server_state)
    SamplingRequest.process_request = process_seeded


def connect(args):
    """-> the DistGraph. Servers serve inside initialize() and never come back."""
    seed_servers(args.seed)
    with contextlib.redirect_stdout(sys.stderr):                    # DGL's own messages
        dgl.distributed.initialize(str(args.ip_config))
        return dgl.distributed.DistGraph(args.graph_name, part_config=str(args.part_config))


def disconnect():
    """A barrier of all hosts, after which the servers end."""
    with contextlib.redirect_stdout(sys.stderr):
        dgl.distributed.exit_client()


def guarded(main, *args):
    """Runs main(*args). An error ends this process at once: DistDGL's exit handler would wait for the other hosts."""
    try:
        return main(*args)
    except SystemExit as e:
        if not e.code:
            raise
        code = e.code
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)


def write_config(args):
    """out/config.json: the arguments in force and what they ran on."""
    try:
        git = subprocess.run(["git", "-C", Path(__file__).parent, "rev-parse", "-q", "--verify", "HEAD"],
                             capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:                                       # no git here
        git = ""
    config = dict(vars(args), world_size=dist.get_world_size(), python=sys.version.split()[0], torch=torch.__version__,
                  dgl=dgl.__version__, numpy=np.__version__, git=git,
                  started=float(os.environ.get("EAT_STARTED", time.time())))
    (args.out / "config.json").write_text(json.dumps(config, indent=1, default=str) + "\n")


def main(args):
    check_files(args)
    g = connect(args)
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        args.out.mkdir(parents=True, exist_ok=True)
        (args.out / "metrics.jsonl").write_text("")
        write_config(args)
    train(args, g)
    disconnect()


if __name__ == "__main__":
    guarded(main, check(arguments().parse_args()))
