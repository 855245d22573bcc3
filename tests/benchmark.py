"""The tables and ratios in the README, each printed by one command; every figure is a mean or a ratio within one run.

    python tests/benchmark.py partitions            entropy, cut and balance of all methods on the graphs of --data
    python tests/benchmark.py weights               EW's edge weights against a Python loop over the nodes
    python tests/benchmark.py scale --dataset synthetic:1000000,50,40       time and memory against DGL's partition_graph

What was measured is kept in --results, one JSON object per line, and not measured again.
"""
import argparse
import contextlib
import io
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import mean

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["DGLBACKEND"] = "pytorch"

import dgl
import torch
import torch.nn.functional as F

import partition

BALANCE = ["--balance_train", "--balance_edges"]
METHODS = {"random": ["--part_method", "random"], "dgl": ["--part_method", "dgl"], "metis": ["--part_method", "metis"],
           "ew": ["--part_method", "ew"], "ew + balance": ["--part_method", "ew", *BALANCE],
           "refined": ["--part_method", "metis", *BALANCE, "--refine", "1.25", "--tries", "3"]}


def load(dataset):
    return partition.load(partition.check(partition.arguments().parse_args(["--dataset", str(dataset)])))


def stats_of(*flags):
    """partition.py with these flags in this process -> its stats.json"""
    with tempfile.TemporaryDirectory() as tmp, contextlib.redirect_stdout(io.StringIO()):
        args = partition.check(partition.arguments().parse_args([*map(str, flags), "--output", f"{tmp}/parts"]))
        partition.main(args)
        return json.loads((args.output / "stats.json").read_text())


def partitions(args, measured):
    graphs = sorted(p for p in args.data.glob("*.npz"))
    for graph in graphs:
        for num_parts in args.num_parts:
            for method, flags in METHODS.items():
                for seed in range(args.seeds):
                    measured(("partitions", graph.stem, num_parts, method, seed), lambda: {k: v for k, v in stats_of(
                        "--dataset", graph, "--num_parts", num_parts, "--seed", 10 * seed, *flags).items() if k != "parts"})
    print("| graph | parts | method | entropy train | val | cut % | nodes | train nodes | edges | s |\n|" + "---|" * 10)
    over = {}
    for graph in graphs:
        for num_parts in args.num_parts:
            rows = {m: [measured(("partitions", graph.stem, num_parts, m, s)) for s in range(args.seeds)] for m in METHODS}
            keys = ("total_entropy", "val_entropy", "edge_cut")
            base = [mean(r[k] for r in rows["metis"]) for k in keys]
            for method, runs in rows.items():
                value = [mean(r[k] for r in runs) for k in keys]
                ratio = [100 * (v / b - 1) for v, b in zip(value, base)]
                over.setdefault(method, []).append(ratio)
                largest = [f"{max(r['imbalance'][k] for r in runs):.2f}" for k in ("nodes", "train_nodes", "edges")]
                print(f"| {graph.stem} | {num_parts} | {method} | {value[0]:.3f} ({ratio[0]:+.0f} %) "
                      f"| {value[1]:.3f} ({ratio[1]:+.0f} %) | {100 * value[2]:.1f} (x{1 + ratio[2] / 100:.2f}) | "
                      + " | ".join(largest) + f" | {mean(sum(r['seconds'].values()) for r in runs):.1f} |")
    for method, ratios in over.items():
        print(f"{method}: on average over METIS: train {mean(r[0] for r in ratios):+.1f} %, "
              f"val {mean(r[1] for r in ratios):+.1f} %, cut x{1 + mean(r[2] for r in ratios) / 100:.2f}")


def loop_over_nodes(g, feat, c, fan_out=25):
    """EW's weights as a loop over the nodes, each with one operation for its edges"""
    x, degree = F.normalize(feat, dim=1), g.in_degrees().float()
    term, weight = 1 - torch.exp(-fan_out / degree), torch.empty(g.num_edges(), dtype=torch.int64)
    for v in range(g.num_nodes()):
        u, _, edge = g.in_edges(v, form="all")
        weight[edge] = (100 * (c * x[u] @ x[v] + (term[u] + term[v]) / 2)).round().long().clamp(min=1)
    return weight


def weights(args, measured):
    for name in ("amazon_computers", "pubmed"):
        g, view = load(args.data / f"{name}.npz")
        feat = g.ndata["feat"]
        partition.edge_weights(view, feat, 0.5)                                            # warm
        seconds = []
        for f in (loop_over_nodes, *5 * [partition.edge_weights]):
            tic = time.perf_counter()
            weight = f(view, feat, 0.5)
            seconds.append(time.perf_counter() - tic)
            if f is loop_over_nodes:
                slow = weight
        fast, difference = min(seconds[1:]), (weight - slow).abs()
        print(f"{name}: loop {seconds[0]:.3f} s, edge_weights {fast:.4f} s, {seconds[0] / fast:.0f} times as fast; "
              f"{int((difference > 0).sum())} of {len(weight)} weights differ (by at most {int(difference.max())})")


def plain_dgl(args, measured):
    """One process of scale: DGL's own partition_graph, with DGL's METIS, on the graph that partition.py reads"""
    g, _ = load(args.dataset)
    with tempfile.TemporaryDirectory() as tmp, contextlib.redirect_stdout(io.StringIO()):
        tic = time.perf_counter()
        dgl.distributed.partition_graph(g, "g", 4, tmp)
        seconds = time.perf_counter() - tic
    print(json.dumps(dict(seconds=seconds, peak=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)))


def scale(args, measured):
    with tempfile.TemporaryDirectory() as tmp:
        subprocess.run([sys.executable, ROOT / "partition.py", "--dataset", args.dataset, "--output", f"{tmp}/parts"],
                       check=True)
        stats = json.loads(Path(tmp, "parts/stats.json").read_text())
    seconds, edges = stats["seconds"], sum(p["edges"] for p in stats["parts"]) / 2e6
    print(f"edge weights (and the simple graph): {seconds['weights'] / seconds['metis']:.2f} of METIS's time; per million "
          f"undirected edges {sum(seconds.values()) / edges:.2f} s and {stats['peak_memory_gb'] / edges:.2f} GB")
    if not args.alone:
        other = json.loads(subprocess.run([sys.executable, __file__, "plain_dgl", "--dataset", args.dataset], check=True,
                                          stdout=subprocess.PIPE).stdout.splitlines()[-1])
        print(f"DGL's partition_graph alone: {other['seconds']:.1f} s, peak {other['peak']:.2f} GB; ew takes "
              f"{sum(seconds.values()) / other['seconds']:.2f} times as long, reading included")


BENCHMARKS = dict(partitions=partitions, weights=weights, scale=scale, plain_dgl=plain_dgl)


def main():
    p = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("what", choices=BENCHMARKS)
    p.add_argument("--data", type=Path, default=ROOT.parent / "shared/data", help="directory of .npz graphs")
    p.add_argument("--results", type=Path, default=ROOT / "out/benchmark.jsonl")
    p.add_argument("--num_parts", type=int, nargs="+", default=[4, 8])
    p.add_argument("--seeds", type=int, default=5)
    p.add_argument("--dataset", default="synthetic:1000000,50,40", help="of scale")
    p.add_argument("--alone", action="store_true", help="scale without DGL's partition_graph")
    args = p.parse_args()
    args.results.parent.mkdir(exist_ok=True)
    known = {tuple(r["key"]): r["value"] for r in map(json.loads, args.results.read_text().splitlines())} \
        if args.results.exists() else {}

    def measured(key, measure=None):
        if key not in known:
            known[key] = measure()
            with args.results.open("a") as f:
                f.write(json.dumps(dict(key=key, value=known[key])) + "\n")
        return known[key]

    BENCHMARKS[args.what](args, measured)


if __name__ == "__main__":
    main()
