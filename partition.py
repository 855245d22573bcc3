"""EW: entropy-aware, edge-weighted graph partitioning (the paper's first technique).

    python partition.py --dataset tests/data/debian.npz --num_parts 4 --output out/parts

METIS cuts light edges first. EW makes an edge heavy when its two ends look alike and when neighbour sampling is likely to
use it, so that nodes of one class stay together and the label entropy of the parts falls.

Reads   --dataset, one of
          NAME.npz           src, dst (each undirected edge once), feat (N, F), label (N,) classes or (N, C) 0/1 and
                             train_mask, val_mask, test_mask (N,), or --split instead of the masks
          NAME.bin           a DGLGraph (dgl.save_graphs) with these in ndata; it stays directed, as given
          flickr, yelp, reddit (dgl.data), ogbn-products, ogbn-papers100M (needs `pip install ogb`)
          synthetic:N,D,C    a random graph of N nodes, N*D/2 undirected edges and C classes, for tests of scale
Writes  a DistDGL partition directory (written by dgl.distributed.partition_graph), with beside DGL's own files
        node_map.pt, the original id of every node in DistDGL's numbering, and stats.json, printed as a table too.
"""
import argparse
import contextlib
import io
import json
import math
import os
import re
import resource
import shutil
import sys
import time
from pathlib import Path

os.environ.setdefault("DGLBACKEND", "pytorch")
import dgl
import dgl.function as fn
import numpy as np
import pymetis
import torch
import torch.nn.functional as F
from tqdm import tqdm

# N nodes, E edges, F features, C classes, P parts
MASKS = ("train_mask", "val_mask", "test_mask")
PAPER_C = {"flickr": 10, "reddit": 0.5, "yelp": 0.1, "ogbn-products": 0.5}                # papers100M: METIS


def label_entropy(label, part, num_parts):
    """Entropy of each part, in bits: H_i = -sum_c p_ic log2 p_ic, p_ic = share of class c among the part's nodes.
    Multi-label: the sum over the labels of the binary entropy of "has label c".
    label (n,) classes or (n, C) 0/1, part (n,) -> (P,); a part with no nodes has entropy 0."""
    n = torch.bincount(part, minlength=num_parts).clamp(min=1)[:, None]                    # (P, 1)
    entr = torch.special.entr                                                              # -p ln p, and 0 at 0
    if label.dim() == 1:
        num_classes = int(label.max()) + 1 if len(label) else 1
        p = torch.bincount(part * num_classes + label, minlength=num_parts * num_classes).view(num_parts, -1) / n
        return entr(p.double()).sum(1) / math.log(2)
    p = torch.zeros(num_parts, label.shape[1], dtype=torch.double).index_add_(0, part, label.double()) / n
    return (entr(p) + entr(1 - p)).sum(1) / math.log(2)


def total_entropy(label, part, num_parts):
    """H = sum_i (n_i / n) H_i: what EW minimises. The arguments are those of label_entropy; bits."""
    n = torch.bincount(part, minlength=num_parts).double()
    return float((n / n.sum().clamp(min=1) * label_entropy(label, part, num_parts)).sum())


def simple_view(g):
    """What METIS partitions: g without direction, self-loops and parallel edges. Edge E/2 + i is edge i reversed."""
    u, v = g.edges()
    key = torch.unique(torch.minimum(u, v) * g.num_nodes() + torch.maximum(u, v))         # 5 times as fast as to_bidirected
    u, v = key // g.num_nodes(), key % g.num_nodes()
    u, v = u[u != v], v[u != v]
    return dgl.graph((torch.cat([u, v]), torch.cat([v, u])), num_nodes=g.num_nodes())


def edge_weights(g, feat, c, fan_out=25):
    """EW: w(u,v) = round(100 (c cos(x_u, x_v) + 1 - exp(-fan_out / d))), and at least 1.
    g from simple_view, feat (N, F) -> (E,) int64, equal in both directions. cos of a zero feature vector is 0."""
    u, v = (end[:g.num_edges() // 2] for end in g.edges())
    x = F.normalize(feat.float(), dim=1)
    cos = dgl.ops.u_dot_v(dgl.graph((u, v), num_nodes=len(x)), x, x).flatten()             # (E/2,)
    # ASSUMED: the degree term is the mean over the two ends. 1 - exp(-fan_out / d) grows with the chance that the end
    # of degree d samples this edge, and METIS needs one weight for both directions.
    term = 1 - torch.exp(-fan_out / g.in_degrees())                                        # (N,)
    weight = 100 * (c * cos + (term[u] + term[v]) / 2)
    # ASSUMED: dissimilar ends give weight 1 (METIS crashes on 0 and below).
    return weight.round().long().clamp(min=1).repeat(2)


def same_class_edges(g, label, train):
    """Beyond the paper: the edges between two training nodes of one class (multi-label: with a label in common).
    g a graph, label (N,) or (N, C), train (N,) bool -> (E,) bool"""
    y = (F.one_hot(label.clamp(min=0)) if label.dim() == 1 else label).float() * train[:, None]
    return dgl.ops.u_dot_v(g, y, y).flatten() > 0


def metis(g, num_parts, weight=None, load=None, seed=0, cuts=1):
    """Parts of about equal load and little total weight of cut edges, by METIS, k-way as in DGL.
    g the simple view, weight (E,) int64 positive and symmetric, or None for all 1; load (N,), None: nodes count alike;
    cuts: so many tries inside METIS -> (N,) part of each node."""
    start, end, edge = (t.numpy() for t in g.adj_tensors("csr"))
    isolated = g.in_degrees() == 0
    load = (torch.ones(g.num_nodes()) if load is None else 20 * load).round().long().masked_fill(isolated, 0)
    for recursive in (False, True):         # k-way leaves parts of a tiny graph empty, recursive bisection does not
        _, part = pymetis.part_graph(num_parts, pymetis.CSRAdjacency(adj_starts=start, adjacent=end), recursive=recursive,
                                     vweights=load.numpy(), eweights=None if weight is None else weight.numpy()[edge],
                                     options=pymetis.Options(seed=seed + 1, ncuts=cuts))   # to METIS 0 and 1 are one seed
        part = torch.tensor(part, dtype=torch.int64)
        size = torch.bincount(part[~isolated], minlength=num_parts)
        if (size > 0).all():
            room = (-(-g.num_nodes() // num_parts) - size).clamp(min=0)     # isolated nodes fill the parts up
            part[isolated] = torch.repeat_interleave(room)[:int(isolated.sum())]
            return part
    fail(f"--num_parts {num_parts}: METIS finds no such parts with an edge in each; ask for fewer parts")


def expected_classes(g, feat, label, train):
    """Beyond the paper: what the training nodes tell about every node's class. Training nodes have their own label; for the
    others a ridge regression, fitted on the training nodes, of the label on the features, their means over one and two hops
    and the labels of neighbouring training nodes. Multi-label: a column for "has c" and one for "has not c".
    g the simple view, feat (N, F), label (N,) or (N, C), train (N,) bool -> (N, C) or (N, 2C) shares"""
    single = label.dim() == 1
    y = (F.one_hot(label.clamp(min=0)) if single else label).float() * train[:, None]      # no other label is looked at

    def mean(x):
        return dgl.ops.copy_u_mean(g, x)

    x = F.normalize(feat.float(), dim=1)
    seen = mean(train.float()[:, None]).clamp(min=1e-9)
    x = torch.cat([x, mean(x), mean(mean(x)), mean(y) / seen, torch.ones(len(x), 1)], 1)
    solution = torch.linalg.solve(x[train].T @ x[train] + torch.eye(x.shape[1]), x[train].T @ y[train])
    share = (x @ solution).clamp(0.001, 0.999)
    share = F.normalize(share ** 2, p=1, dim=1) if single else share                       # squared: nearer to a decision
    share[train] = y[train]
    return share if single else torch.cat([share, 1 - share], 1)


def refine(g, part, load, limit, weight=None, classes=None, max_cut=1.28, seed=0, rounds=100):
    """Beyond the paper: moves nodes until no part has more than limit times the mean load, at the least weight of cut edges,
    or, given classes, at the least expected entropy with at most max_cut times the weight that is cut at first.

    A node likes part b by  mu * (weight of its neighbours in b)  [+ sum_c q_c log2 p_bc],  q its classes, p_b those of b's
    nodes, less what b charges for its load. The prices solve the dual of the balance constraint over the soft choices at
    temperature T, which falls from round to round; in each round a random half of the nodes chooses anew.

    g the simple view, part (N,), load (N, Q) with a mean of 1 per part, limit (Q,) inf for "no limit", weight (E,),
    classes (N, C) from expected_classes -> (N,); part itself where no better partition within the limits is found"""
    random = torch.Generator().manual_seed(seed)
    n, num_parts = len(part), int(part.max()) + 1
    weight = torch.ones(g.num_edges()) if weight is None else weight / weight.float().mean()
    charge = load * n / num_parts                                                          # (N, Q), 1 on average
    price, mu, best, found = torch.zeros(num_parts, load.shape[1]), 10.0, math.inf, part
    for r in tqdm(range(rounds + 1), "refine", leave=False, disable=None):
        inside = F.one_hot(part, num_parts).float()                                        # (N, P)
        near = dgl.ops.u_mul_e_sum(g, inside, weight[:, None])                             # (N, P)
        cut = 1 - float((near * inside).sum()) / g.num_edges()
        sizes = inside.T @ load                                                            # (P, Q)
        if r == 0:
            allowed, overload = max_cut * cut, (sizes.max(0).values - limit).clamp(min=0)
        score, value = mu * near, cut
        if classes is not None:
            count = inside.T @ classes                                                     # (P, C)
            value = float(torch.special.entr(F.normalize(count, p=1, dim=1)).sum(1) @ inside.sum(0)) if cut <= allowed else math.inf
            score += classes @ F.normalize(count + 1e-3, p=1, dim=1).log2().T
            mu = mu * 1.15 if cut > allowed else mu / 1.08
        if (sizes <= limit).all() and (sizes[:, 2] > 0).all() and value < best:
            best, found = value, part
        temperature = 0.3 * (0.02 / 0.3) ** (r / rounds)
        bound = limit - 0.005 + overload * max(0, 1 - r / (0.3 * rounds))
        free = torch.rand(n, generator=random) < 0.5
        fixed, step, last = inside[~free].T @ load[~free], torch.full_like(price, 0.05), 0
        for _ in range(60):                                                                # Rprop on the dual
            soft = F.softmax((score[free] - charge[free] @ price.T) / temperature, 1)
            slope = (fixed + soft.T @ load[free] - bound).sign()
            step *= torch.where(slope * last > 0, 1.2, torch.where(slope * last < 0, 0.5, 1.0))
            price, last = (price + step * slope).clamp(min=0), slope
        noise = -torch.empty(int(free.sum()), num_parts).exponential_(generator=random).log()       # Gumbel
        part = part.clone()
        part[free] = ((score[free] - charge[free] @ price.T) / temperature + noise).argmax(1)
    return found


@contextlib.contextmanager
def use_assignment(part):
    """DGL's partition_graph has no argument for a ready assignment, so METIS's answer is replaced for this one call."""
    module = dgl.distributed.partition
    original, module.metis_partition_assignment = module.metis_partition_assignment, lambda *_, **__: part
    try:
        yield
    finally:
        module.metis_partition_assignment = original


def write(g, name, num_parts, part, output):
    """DistDGL's directory, written by DGL; with part None DGL's own METIS assigns the nodes, training nodes and edges
    balanced. -> node_map (N,): the original id of each node in DistDGL's numbering, also in node_map.pt"""
    plain = dict(balance_ntypes=g.ndata["train_mask"], balance_edges=True)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.nullcontext() if part is None else use_assignment(part):
            node_map, _ = dgl.distributed.partition_graph(
                g, name, num_parts, str(output), return_mapping=True, **(plain if part is None else {}))
    except (KeyError, IndexError, dgl.DGLError):                    # on a part without a node or without an edge
        fail(f"--num_parts {num_parts}: DGL can't write parts without an edge; ask for fewer parts")
    for path in output.glob("part*/graph.dgl"):     # DGL leaves its 4096 bytes of header unset past the 32 that it uses
        with open(path, "r+b") as f:
            f.seek(32)
            f.write(bytes(4096 - 32))
    torch.save(node_map, output / "node_map.pt")
    return node_map


def statistics(g, part, num_parts):
    """The entropies, sizes and cut of a partition, with the keys of stats.json."""
    label, train, val = (g.ndata[k] for k in ("label", "train_mask", "val_mask"))
    u, v = g.edges()
    cut = part[u] != part[v]
    halo = torch.unique(part[v[cut]] * g.num_nodes() + u[cut]) // g.num_nodes()            # (part, remote source) pairs
    columns = dict(nodes=part, train_nodes=part[train], edges=part[v], halo_nodes=halo)
    entropy = label_entropy(label[train], part[train], num_parts)
    sizes = {k: torch.bincount(p, minlength=num_parts).tolist() for k, p in columns.items()}
    return dict(total_entropy=total_entropy(label[train], part[train], num_parts),
                val_entropy=total_entropy(label[val], part[val], num_parts),
                entropy_std=float(entropy.std(correction=0)),
                edge_cut=float(cut.double().mean()) if len(cut) else 0.0,
                parts=[dict(entropy=float(entropy[i]), **{k: sizes[k][i] for k in sizes}) for i in range(num_parts)])


def table(stats):
    """stats.json for the screen."""
    row = "{:>5} {:>13} {:>9} {:>12} {:>10} {:>11}"
    lines = [row.format("part", "entropy/bits", "nodes", "train nodes", "edges", "halo nodes")]
    for i, p in enumerate(stats["parts"]):
        lines.append(row.format(i, f"{p['entropy']:.3f}", p["nodes"], p["train_nodes"], p["edges"], p["halo_nodes"]))
    seconds = ", ".join(f"{k} {s:.1f}" for k, s in stats["seconds"].items())
    return "\n".join(lines + [
        f"total entropy {stats['total_entropy']:.3f} bits (validation nodes {stats['val_entropy']:.3f}), "
        f"std over parts {stats['entropy_std']:.3f}, edge cut {100 * stats['edge_cut']:.1f} %",
        f"seconds: {seconds}; peak memory {stats['peak_memory_gb']:.2f} GB"])


# What follows reads and checks the input.

def fail(message):
    print(f"partition.py: {message}", file=sys.stderr)
    sys.exit(2)


def load_npz(path):
    """path -> DGLGraph with both directions of each edge and feat, label and the masks in ndata."""
    try:
        with np.load(path) as z:
            data = {k: np.asarray(z[k]) for k in ("src", "dst", "feat", "label", *MASKS) if k in z.files}
    except Exception as e:                  # numpy raises a dozen kinds here: no such file, no zip, truncated, pickled
        fail(f"--dataset {path} can't be read as .npz ({str(e).splitlines()[0]}); write one with numpy.savez")
    missing = [k for k in ("src", "dst", "feat", "label", *MASKS) if k not in data]
    if missing:
        fail(f"--dataset {path} lacks the array(s) {', '.join(missing)}; the README lists what it must hold")

    def check(ok, array, problem):
        if not ok:
            fail(f"--dataset {path}: {array} {problem}")

    check(data["label"].ndim in (1, 2) and data["label"].dtype.kind in "iub" and data["label"].size > 0,
          "label", "must hold integers: (N,) classes or (N, C) 0/1")
    n = len(data["label"])
    for k in ("src", "dst"):
        check(data[k].ndim == 1 and data[k].dtype.kind in "iu", k, "must be a one-dimensional array of integers")
    check(len(data["src"]) == len(data["dst"]), "src", f"has {len(data['src'])} ends, but dst has {len(data['dst'])}")
    check(data["feat"].ndim == 2 and data["feat"].dtype.kind in "fiub" and data["feat"].shape[1] > 0,
          "feat", "must be a numeric (N, F) array with F > 0")
    for k in ("feat", *MASKS):
        check(data[k].shape[:1] == (n,), k, f"has shape {data[k].shape}, but label has {n} rows")
    for k in MASKS:
        check(data[k].ndim == 1 and np.isin(data[k], (0, 1)).all(), k, "must be (N,) of true and false")
    for k in ("src", "dst"):
        check(((data[k] >= 0) & (data[k] < n)).all(), k, f"names a node outside 0..{n - 1}")
    check((np.abs(data["feat"].astype(np.float32)) < 1e15).all(), "feat", "holds NaN, infinite or huge values (1e15); replace")
    if data["label"].ndim == 2:
        check(np.isin(data["label"], (0, 1)).all(), "label", "is (N, C), so it must hold 0 and 1 only")
    else:
        check((data["label"] >= 0).all() and (data["label"] < n).all(), "label", f"holds a class outside 0..{n - 1}")
    check(len(data["src"]) > 0, "src", "holds no edge")
    check(data["train_mask"].any(), "train_mask", "selects no node")

    src, dst = (torch.from_numpy(data[k].astype(np.int64)) for k in ("src", "dst"))
    g = dgl.to_bidirected(dgl.graph((src, dst), num_nodes=n))
    g.ndata["feat"] = torch.from_numpy(data["feat"].astype(np.float32))
    g.ndata["label"] = torch.from_numpy(data["label"].astype(np.int64))
    for k in MASKS:
        g.ndata[k] = torch.from_numpy(data[k].astype(bool))
    return g


def arguments():
    p = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--dataset", default=Path(__file__).parent / "tests/data/debian.npz", help="the .npz file")
    p.add_argument("--num_parts", type=int, default=4, help="P: number of parts = number of hosts")
    p.add_argument("--part_method", default="ew", choices=("ew", "metis", "random", "dgl"),
                   help="ew: the paper's; metis: the same with unit weights; dgl: DGL's METIS with its balance flags on")
    p.add_argument("--c", type=float, default=0.5, help="weight of the feature similarity in EW (paper: .1 to 10)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output", type=Path, default="out/parts", help="the directory to write")
    p.error = fail
    return p


def check(args):
    """Everything that can be wrong with the arguments themselves."""
    if args.num_parts < 1:
        fail(f"--num_parts {args.num_parts}: there must be at least 1 part")
    if not 0 <= args.c <= 1e6:
        fail(f"--c {args.c} must be a number from 0 to 1e6")
    if not 0 <= args.seed <= 200_000:
        fail(f"--seed {args.seed} must be at least 0 and at most 200000")
    try:
        args.output = args.output.resolve()                         # also where a link leads
        names = {p.name for p in args.output.iterdir()} if args.output.exists() else set()
    except OSError as e:
        fail(f"--output {args.output} can't be used ({e.strerror}); name another directory")
    others = {n for n in names if not re.fullmatch(r"part\d+|stats\.json|node_map\.pt", n)}
    if names and not ({"stats.json", "node_map.pt"} <= names and len(others) == 1 and others.pop().endswith(".json")):
        fail(f"--output {args.output} exists and is no earlier partition; name another directory or remove it")
    return args


def main(args):
    seconds, tic = {}, time.time()

    def lap(step):
        nonlocal tic
        seconds[step], tic = time.time() - tic, time.time()

    g = load_npz(args.dataset)
    if args.num_parts > g.num_nodes():
        fail(f"--num_parts {args.num_parts} is more than the graph's {g.num_nodes()} nodes; ask for fewer parts")
    lap("load")

    part = None                                                                            # dgl: assigned while writing
    if args.part_method == "random":                                                       # equal sizes, no part empty
        order = torch.randperm(g.num_nodes(), generator=torch.Generator().manual_seed(args.seed))
        part = torch.argsort(order) % args.num_parts
    elif args.part_method != "dgl":
        view, weight = simple_view(g), None
        if args.part_method == "ew":
            weight = edge_weights(view, g.ndata["feat"], args.c)
        lap("weights")
        part = metis(view, args.num_parts, weight, args.seed)
        lap("metis")

    dgl.random.seed(args.seed)
    name = Path(args.dataset).stem[:60].replace("stats", "graph")   # it becomes NAME.json and part of names in /dev/shm
    new = args.output.with_name(f"{args.output.name}.{os.getpid()}")                       # renamed when it is complete
    try:
        new.mkdir(parents=True)
    except OSError as e:
        fail(f"--output {args.output} can't be written ({e.strerror}); name another directory")
    try:
        node_map = write(g, name, args.num_parts, part, new)
        book = dgl.distributed.load_partition_book(str(new / f"{name}.json"), 0)[0]
        part = torch.empty(g.num_nodes(), dtype=torch.int64)
        part[node_map] = book.nid2partid(torch.arange(g.num_nodes()))                      # as written
        lap("write")
        stats = dict(method=args.part_method, num_parts=args.num_parts, seed=args.seed,
                     c=args.c if args.part_method == "ew" else None, **statistics(g, part, args.num_parts),
                     seconds=seconds, peak_memory_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        (new / "stats.json").write_text(json.dumps(stats, indent=1) + "\n")
        shutil.rmtree(args.output, ignore_errors=True)
        new.rename(args.output)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    print(f"{name}: {g.num_nodes()} nodes, {g.num_edges()} edges, in {args.num_parts} parts by {args.part_method}")
    print(table(stats))


if __name__ == "__main__":
    main(check(arguments().parse_args()))
