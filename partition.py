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
import signal
import sys
import time
import warnings
from pathlib import Path
from unittest import mock

os.environ.setdefault("DGLBACKEND", "pytorch")
import dgl
import numpy as np
import pymetis
import torch
import torch.nn.functional as F
from tqdm import tqdm

warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta")

# N nodes, E edges, F features, C classes, P parts
MASKS = ("train_mask", "val_mask", "test_mask")
ARRAYS = ("src", "dst", "feat", "label", *MASKS)
PAPER_C = {"flickr": 10, "reddit": 0.5, "yelp": 0.1, "ogbn-products": 0.5, "ogbn-papers100M": None}     # None: METIS


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
    """What METIS partitions: g without direction, parallel edges and self-loops. Edge E/2 + i is edge i reversed."""
    u, v = g.edges()
    key = torch.unique(torch.minimum(u, v) * g.num_nodes() + torch.maximum(u, v))         # 5 times as fast as to_bidirected
    u, v = key // g.num_nodes(), key % g.num_nodes()
    u, v = u[u != v], v[u != v]
    return dgl.graph((torch.cat([u, v]), torch.cat([v, u])), num_nodes=g.num_nodes())


def edge_weights(g, feat, c, fan_out=25):
    """EW: w(u,v) = round(100 (c cos(x_u, x_v) + 1 - exp(-fan_out / d))), and at least 1.
    g from simple_view, feat (N, F) -> (E,) int64, equal in both directions. cos of a zero feature vector is 0."""
    u, v = (end[:g.num_edges() // 2] for end in g.edges())                                 # sorted by u
    x, degree = feat.float(), torch.bincount(g.edges()[0], minlength=len(feat))
    row = F.pad(torch.bincount(u, minlength=len(x)).cumsum(0), (1, 0))
    upper = torch.sparse_csr_tensor(row, v, torch.zeros(len(v)), (len(x), len(x)))
    cos = torch.sparse.sampled_addmm(upper, x, x.T, beta=0).values()                       # (E/2,); u_dot_v is slower
    norm = torch.linalg.vector_norm(x, dim=1).clamp(min=1e-12)
    cos = cos / norm[u] / norm[v]
    # ASSUMED: the degree term is the mean over the two ends. 1 - exp(-fan_out / d) grows with the chance that the end
    # of degree d samples this edge, and METIS needs one weight for both directions.
    term = 1 - torch.exp(-fan_out / degree)                                                # (N,)
    weight = 100 * (c * cos + (term[u] + term[v]) / 2)
    # ASSUMED: dissimilar ends give weight 1 (METIS crashes on 0 and below).
    return weight.round().long().clamp(min=1).repeat(2)


def metis(g, num_parts, weight=None, load=None, seed=0):
    """Parts of about equal load and little total weight of cut edges, by METIS, k-way as in DGL.
    g the simple view, weight (E,) int64 positive and symmetric, None: all 1; load (N,), None: nodes count alike -> (N,)"""
    start, end, edge = dgl.graph(g.edges(), num_nodes=g.num_nodes()).adj_tensors("csr")    # a copy, so that g keeps no CSR
    isolated, weight = start.diff() == 0, None if weight is None else weight[edge].numpy()
    del edge                                                        # METIS is the peak of memory
    load = (torch.ones(g.num_nodes()) if load is None else 20 * load).round().long().masked_fill(isolated, 0)
    for recursive in (False, True):         # k-way leaves parts of a tiny graph empty, recursive bisection does not
        _, part = pymetis.part_graph(num_parts, pymetis.CSRAdjacency(adj_starts=start.numpy(), adjacent=end.numpy()),
                                     recursive=recursive, vweights=load.numpy(), eweights=weight,
                                     options=pymetis.Options(seed=seed + 1))               # to METIS 0 and 1 are one seed
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


def cut_share(g, part, weight=None):
    """Share of the weight (E,), or of the number, of g's edges that lies between two parts; part (N,)"""
    cut = (part[g.edges()[0]] != part[g.edges()[1]]).double()
    return float(cut.mean() if weight is None else (cut @ weight.double()) / weight.sum())


def refine(g, part, load, limit, weight=None, classes=None, max_cut=1.0, seed=0, rounds=100):
    """Beyond the paper: moves nodes until no part has more than limit times the mean load, at the least weight of cut edges,
    or, given classes, at the least expected entropy with at most the share max_cut of the weight cut.

    Node v likes part b by  (weight of v's neighbours in b) [+ lam sum_c q_vc log2 p_bc] - sum_q price_bq load_vq,  q_v its
    classes, p_b those of b's nodes; lam falls while too much is cut. In each round a random half of the nodes choose anew,
    by a softmax at a temperature that falls too. The prices solve the dual of the balance constraint over these choices.

    g the simple view, part (N,), load (N, Q) with a mean of 1 per part, the last one of edges, which no part may be without,
    limit (Q,) inf for "no limit", weight (E,), classes (N, C) -> (N,): the best of all rounds, the start included"""
    random = torch.Generator().manual_seed(seed)
    n, num_parts = len(part), int(part.max()) + 1
    weight = torch.ones(g.num_edges()) if weight is None else weight / weight.float().mean()
    charge = load * n / num_parts                                                          # (N, Q), 1 on average
    price, lam, best, found = torch.zeros(num_parts, load.shape[1]), 3.0, (math.inf,), part
    for r in tqdm(range(rounds + 1), "refine", leave=False, disable=None):
        inside = F.one_hot(part, num_parts).float()                                        # (N, P)
        score = dgl.ops.u_mul_e_sum(g, inside, weight[:, None])                            # (N, P)
        sizes = inside.T @ load                                                            # (P, Q)
        value = cut = 1 - float((score * inside).sum()) / g.num_edges()
        if classes is not None:
            count = inside.T @ classes                                                     # (P, C)
            value = float(inside.sum(0) @ torch.special.entr(F.normalize(count, p=1, dim=1)).sum(1))
            score += lam * classes @ F.normalize(count + 1e-3, p=1, dim=1).log2().T
            lam *= 1.08 if cut <= max_cut else 1 / 1.15
        value = max(0, float((sizes - limit).max()), cut - max_cut), value
        if value < best and sizes[:, -1].all():
            best, found = value, part
        temperature = 0.5 * 0.2 ** (r / rounds)
        free = torch.rand(n, generator=random) < 0.5
        fixed, moving, like, cost = inside[~free].T @ load[~free], load[free], score[free], charge[free]
        step, last = torch.full_like(price, temperature / 4), 0
        for _ in range(30):                                                                # Rprop on the dual
            soft = F.softmax((like - cost @ price.T) / temperature, 1)
            slope = (fixed + soft.T @ moving - limit + 0.005).sign()
            step *= torch.where(slope * last > 0, 1.2, torch.where(slope * last < 0, 0.5, 1.0))
            price, last = (price + step * slope).clamp(min=0), slope
        noise = -torch.empty_like(like).exponential_(generator=random).log()               # Gumbel
        part = part.clone()
        part[free] = ((like - cost @ price.T) / temperature + noise).argmax(1)
    return found


def assign(g, view, args, lap):
    """Every --part_method but dgl. view from load -> (N,): the part of each node, or with several trainers its trainer"""
    n, parts = g.num_nodes(), args.num_parts * args.num_trainers_per_machine
    if args.part_method == "random":                                                       # equal sizes, no part empty
        return torch.randperm(n, generator=torch.Generator().manual_seed(args.seed)) % parts
    if parts == 1:
        return torch.zeros(n, dtype=torch.int64)
    feat, label, train = (g.ndata[k] for k in ("feat", "label", "train_mask"))
    weight = classes = best = found = None
    view = simple_view(g) if view is None else view
    if args.part_method == "ew":
        weight = edge_weights(view, feat, args.c)
    balanced = torch.tensor([True, args.balance_train, args.balance_edges])
    load = torch.stack([torch.ones(n), train, torch.bincount(g.edges()[1], minlength=n)], 1)
    load = load * parts / load.sum(0)                                                      # (N, 3), 1 in a part on average
    limit = torch.where(balanced, args.imbalance, math.inf)

    def excess(part):
        return float((torch.zeros(parts, 3).index_add_(0, part, load) - limit).clamp(min=0).max())

    lap("weights")
    if args.refine:
        classes = expected_classes(view, feat, label, train)
        max_cut = args.refine * cut_share(view, metis(view, parts, seed=args.seed), weight)
    for seed in range(args.seed, args.seed + args.tries):
        part = metis(view, parts, weight, n / parts * load[:, balanced].sum(1) if balanced[1:].any() else None, seed)
        if balanced[1:].any() and excess(part):
            part = refine(view, part, load, limit, weight, seed=seed)
        if args.refine:
            most = max(max_cut, 1.07 * cut_share(view, part, weight))         # balance alone may need more than max_cut
            part = refine(view, part, load, limit, weight, classes, most, seed)
        value = excess(part), total_entropy(label[train], part[train], parts)
        if best is None or value < best:
            best, found = value, part
    lap("metis")
    return found


def write(g, name, args, part, output):
    """DistDGL's directory, written by DGL; with part None DGL's own METIS assigns the nodes, training nodes and edges
    balanced. -> node_map (N,): the original id of each node in DistDGL's numbering, also in node_map.pt"""
    balance, patch = dict(balance_ntypes=g.ndata["train_mask"], balance_edges=True), {}
    if part is not None:                                    # partition_graph has no argument for a ready assignment
        balance, patch = {}, dict(metis_partition_assignment=lambda *_, **__: part)
    if args.num_parts > 1:                                  # g has one type: no need for a copy of twice its size
        patch["to_homogeneous"] = lambda g: g
    try:
        with contextlib.redirect_stdout(io.StringIO()), mock.patch.multiple(dgl.distributed.partition, **patch):
            node_map, _ = dgl.distributed.partition_graph(
                g, name, args.num_parts, str(output), num_trainers_per_machine=args.num_trainers_per_machine,
                return_mapping=True, **balance)
        for path in output.glob("part*/graph.dgl"):     # DGL leaves its 4096 bytes of header unset past the 32 it uses
            with open(path, "r+b") as f:
                f.seek(32)
                f.write(bytes(4096 - 32))
        torch.save(node_map, output / "node_map.pt")
    except (KeyError, IndexError, dgl.DGLError, OSError, RuntimeError) as e:
        if part is None and isinstance(e, (KeyError, IndexError)):
            fail(f"--num_parts {args.num_parts}: DGL can't write parts without an edge; ask for fewer parts")
        fail(f"--output {args.output} can't be written ({str(e).splitlines()[-1][:200]}); is the disk full?")
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
                edge_cut=float(cut.double().mean()),
                imbalance={k: max(sizes[k]) * num_parts / sum(sizes[k]) for k in ("nodes", "train_nodes", "edges")},
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
        "largest part over the mean: " + ", ".join(f"{k} {x:.2f}" for k, x in stats["imbalance"].items()).replace("_", " "),
        f"seconds: {seconds}; peak memory {stats['peak_memory_gb']:.2f} GB"])


# What follows reads and checks the input.

def fail(message):
    print(f"partition.py: {message}", file=sys.stderr)
    sys.exit(2)


def warn(message):
    print(f"partition.py: warning: {message}", file=sys.stderr)


def synthetic(num_nodes, degree, num_classes, seed, num_features=100):
    """The arrays of a degree-corrected stochastic block model: Zipf class sizes, Pareto degrees, 7 of 10 edges inside a
    class, features normal around a mean per class."""
    rng, share, num_edges = np.random.default_rng(seed), 1 / np.arange(1, num_classes + 1), num_nodes * degree // 2
    label = rng.choice(num_classes, num_nodes, p=share / share.sum())
    order = np.argsort(label)                               # the nodes by class, each with a stretch of a line
    end = np.concatenate([[0], np.cumsum(rng.pareto(2.5, num_nodes) + 1)])
    start = end[np.searchsorted(label[order], np.arange(num_classes + 1))]                 # of each class

    def pick(low, high):
        point = low + rng.random(num_edges) * (high - low)
        return order[np.searchsorted(end, point, side="right").clip(1, num_nodes) - 1]

    src, inside = pick(0, end[-1]), rng.random(num_edges) < 0.7
    dst = pick(np.where(inside, start[label[src]], 0), np.where(inside, start[label[src] + 1], end[-1]))
    feat = rng.standard_normal((num_nodes, num_features), dtype=np.float32)
    feat += 0.5 * rng.standard_normal((num_classes, num_features), dtype=np.float32)[label]
    return dict(src=src[src != dst], dst=dst[src != dst], feat=feat, label=label)


def read(name, seed=0):
    """--dataset -> its arrays src, dst, feat, label and masks, those that it has, as they are"""
    if sizes := re.fullmatch(r"synthetic:(\d+),(\d+),(\d+)", name):
        n, degree, classes = map(int, sizes.groups())
        if not (0 < degree < n and 0 < classes <= n):
            fail(f"--dataset {name}: in synthetic:N,DEGREE,CLASSES degree and classes must be at least 1 and at most N")
        return synthetic(n, degree, classes, seed)
    if not name.endswith((".npz", ".bin")) and name not in PAPER_C:
        fail(f"--dataset {name} is neither a .npz or .bin file nor synthetic:N,DEGREE,CLASSES, {', '.join(PAPER_C)}")
    try:
        if name.endswith(".npz"):
            with np.load(name) as z:
                return {k: np.asarray(z[k]) for k in ARRAYS if k in z.files}
        if name.endswith(".bin"):
            g = dgl.load_graphs(name, [0])[0][0]
        elif name.startswith("ogbn-"):
            from ogb.nodeproppred import DglNodePropPredDataset
            data = DglNodePropPredDataset(name, root=dgl.data.utils.get_download_dir())
            g, g.ndata["label"] = data[0]
            for mask, split in zip(MASKS, ("train", "valid", "test")):
                g.ndata[mask] = torch.zeros(g.num_nodes()).index_fill_(0, data.get_idx_split()[split], 1)
        else:
            g = getattr(dgl.data, f"{name.capitalize()}Dataset")()[0]
        (src, dst), values = g.edges(), g.ndata
        return dict(src=src.numpy(), dst=dst.numpy(), **{k: values[k].numpy() for k in ARRAYS if k in values})
    except ModuleNotFoundError as e:
        fail(f"--dataset {name} needs {e.name}, which is not installed: .venv/bin/pip install {e.name}")
    except Exception as e:                  # a dozen kinds: no such file, no zip, truncated, pickled, no network
        way_out = "check or replace the file" if name.endswith((".npz", ".bin")) else "it is downloaded on first use" + (
            "; ogb asks before it downloads, so run partition.py in a terminal" if name.startswith("ogbn-") else "")
        fail(f"--dataset {name} can't be read ({type(e).__name__}: {(str(e).splitlines() or [''])[0][:200]}); {way_out}")


def load(args):
    """--dataset -> DGLGraph with feat (N, F) float32, label (N,) int64, -1 for none, or (N, C) 0/1, the masks (N,) bool;
    and its simple view, where the edges were made undirected, otherwise None"""
    name = str(args.dataset)
    data = read(name, args.seed)
    split = args.split or ([50, 25, 25] if name.startswith("synthetic:") else None)

    def need(ok, array, problem):
        if not ok:
            fail(f"--dataset {name}: {array} {problem}")

    for k in ARRAYS:
        need(k in data or split and k in MASKS, k, "is missing; the README lists what a graph must hold"
              + (", --split 50/25/25 stands in for the masks" if k in MASKS else ""))
        if k in data and data[k].ndim == 2 and data[k].shape[1] == 1 and k != "feat":
            data[k] = data[k][:, 0]
    src, dst, feat, label = (data[k] for k in ARRAYS[:4])
    n = len(label) if label.ndim else 0
    need(label.ndim in (1, 2) and label.dtype.kind in "iubf" and label.size, "label", "must be (N,) classes or (N, C) 0/1")
    for k, end in (("src", src), ("dst", dst)):
        need(end.ndim == 1 and end.dtype.kind in "iu", k, "must be a one-dimensional array of integers")
        need(len(end) == len(src), k, f"has {len(end)} ends, but src has {len(src)}")
        need(len(end) > 0, k, "holds no edge")
        need(end.min() >= 0 and end.max() < n, k, f"names a node outside 0..{n - 1} (label has {n} rows)")
    need(feat.ndim == 2 and feat.dtype.kind in "fiub" and feat.size > 0, "feat", "must be a numeric (N, F) array with F > 0")
    need(len(feat) == n, "feat", f"has {len(feat)} rows, but label has {n}")
    need(feat.min() > -1e15 and feat.max() < 1e15, "feat", "holds NaN, infinite or huge values (1e15); replace them")
    if label.ndim == 2:
        need(((label == 0) | (label == 1)).all(), "label", "is (N, C), multi-label, so it must hold 0 and 1 only")
    else:
        if label.dtype.kind == "f":
            label = np.where(np.isnan(label), -1, label)
        need(label.min() >= -1 and label.max() < n and (label == np.floor(label)).all(), "label",
              f"must hold classes from 0 to at most {n - 1}, or -1 or NaN for none")
    label = torch.from_numpy(label.astype(np.int64))
    known = label >= 0 if label.dim() == 1 else torch.ones(n, dtype=torch.bool)

    if split:
        order = torch.randperm(n, generator=torch.Generator().manual_seed(args.seed))
        order = order[known[order]]
        ends = [round(sum(split[:i]) * len(order) / 100) for i in range(4)]
        data.update({k: torch.zeros(n).index_fill_(0, order[a:b], 1).numpy() for k, a, b in zip(MASKS, ends, ends[1:])})
    for k in MASKS:
        need(data[k].shape == (n,), k, f"has shape {data[k].shape}, but label has {n} rows")
        need(((data[k] == 0) | (data[k] == 1)).all(), k, "must hold true and false (or 0 and 1) only")
    masks = torch.stack([torch.from_numpy(data[k].astype(bool)) for k in MASKS])
    need((masks[0] & known).any(), "train_mask", "selects no node with a label")
    if lost := int((masks.any(0) & ~known).sum()):
        warn(f"{lost} nodes of the masks have no label; they are left out of the masks")
    masks &= known
    if twice := int((masks.sum(0) > 1).sum()):
        warn(f"{twice} nodes are in more than one of {', '.join(MASKS)}; their scores mean little")

    src, dst, view = torch.from_numpy(src.astype(np.int64)), torch.from_numpy(dst.astype(np.int64)), None
    g = dgl.graph((src, dst), num_nodes=n)
    if args.undirected or name.endswith(".npz") or name.startswith("synthetic:"):
        loop, view = torch.unique(src[src == dst]), simple_view(g)
        g = dgl.add_edges(view, loop, loop) if len(loop) else view
    g.ndata.update(feat=torch.from_numpy(feat.astype(np.float32, copy=False)), label=label, **dict(zip(MASKS, masks)))
    return g, view


def percentages(text):
    split = [float(p) for p in text.split("/")]
    if len(split) != 3 or min(split) < 0 or sum(split) > 100:
        raise ValueError
    return split


def arguments():
    p = argparse.ArgumentParser(allow_abbrev=False, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    p.add_argument("--dataset", default=Path(__file__).parent / "tests/data/debian.npz",
                   help=f"a .npz or .bin file, synthetic:N,DEGREE,CLASSES or {', '.join(PAPER_C)}")
    p.add_argument("--split", type=percentages, metavar="TRAIN/VAL/TEST",
                   help="random masks of so many percent of the labelled nodes, instead of the dataset's")
    p.add_argument("--undirected", action="store_true", help="add the reverse of every edge (.npz files always have it)")
    p.add_argument("--num_parts", type=int, default=4, help="P: number of parts = number of hosts")
    p.add_argument("--num_trainers_per_machine", type=int, default=1, help="trainers between which a part is divided again")
    p.add_argument("--part_method", choices=("ew", "metis", "random", "dgl"),
                   help="ew: the paper's; metis: the same with unit weights; dgl: DGL's METIS with its balance flags on; "
                        "None: the paper's for its graph, otherwise ew")
    p.add_argument("--c", type=float, help="weight of the similarity in EW; None: the paper's for its graph, otherwise .5")
    p.add_argument("--balance_train", action="store_true", help="balance the training nodes too (dgl always does)")
    p.add_argument("--balance_edges", action="store_true", help="balance the edges too (dgl always does)")
    p.add_argument("--imbalance", type=float, default=1.1, help="most of a balanced quantity in a part, over the mean")
    p.add_argument("--refine", type=float, metavar="CUT", help="then move nodes to lower the entropy (beyond the paper), "
                   "cutting at most CUT times what METIS cuts, or 1.07 times what balance needs (1.25 is good)")
    p.add_argument("--tries", type=int, default=1, help="seeds to try, from --seed on; the lowest total entropy wins")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--output", type=Path, default="out/parts", help="the directory to write")
    p.error = fail
    return p


def check(args):
    """Everything that can be wrong with the arguments themselves. Sets what follows from the dataset."""
    paper = PAPER_C.get(str(args.dataset), 0.5)
    args.part_method = args.part_method or ("ew" if paper else "metis")
    args.c = (paper or 0.5) if args.c is None else args.c
    for k, low, high in (("num_parts", 1, 10_000), ("num_trainers_per_machine", 1, 1000), ("c", 0, 1e6), ("seed", 0, 2e5),
                         ("imbalance", 1.01, 1e6), ("refine", 1, 1e6), ("tries", 1, 10_000)):
        if getattr(args, k) is not None and not low <= getattr(args, k) <= high:
            fail(f"--{k} {getattr(args, k)} must be a number from {low} to {high}")
    if args.part_method in ("random", "dgl"):
        for k in ("balance_train", "balance_edges", "refine"):
            if getattr(args, k):
                fail(f"--{k} works on METIS's parts; use it with --part_method ew or metis, not {args.part_method}")
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
    bar = tqdm(desc="steps", total=4, disable=None, leave=False)

    def lap(step):
        nonlocal tic
        seconds[step], tic = time.time() - tic, time.time()
        bar.update()

    new = args.output.with_name(f"{args.output.name}.{os.getpid()}")                       # renamed when it is complete
    g, view = load(args)
    if args.num_parts * args.num_trainers_per_machine > g.num_nodes():
        fail(f"--num_parts {args.num_parts} is more than the graph's {g.num_nodes()} nodes; ask for fewer parts")
    if args.part_method == "ew" and not g.ndata["feat"].any():
        warn("feat is zero everywhere, so EW sees only the degrees")
    lap("load")
    try:
        new.mkdir(parents=True)
    except OSError as e:
        fail(f"--output {args.output} can't be written ({e.strerror}); name another directory")
    try:
        part = None                                                                        # dgl: assigned while writing
        if args.part_method != "dgl":
            part = assign(g, view, args, lap)
            del view
            if len(torch.unique(part[g.edges()[1]] // args.num_trainers_per_machine)) < args.num_parts:
                fail(f"--num_parts {args.num_parts} gives a part without an edge; ask for fewer parts")
        name = re.sub(r"[^\w.-]", "_", Path(args.dataset).stem[:60]).replace("stats", "graph")  # NAME.json and in /dev/shm
        node_map = write(g, name, args, part, new)
        book = dgl.distributed.load_partition_book(str(new / f"{name}.json"), 0)[0]
        part = torch.empty(g.num_nodes(), dtype=torch.int64)
        part[node_map] = book.nid2partid(torch.arange(g.num_nodes()))                      # as written
        lap("write")
        stats = dict(arguments=vars(args), **statistics(g, part, args.num_parts), seconds=seconds,
                     peak_memory_gb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
        (new / "stats.json").write_text(json.dumps(stats, indent=1, default=str) + "\n")
        if args.output.exists():
            args.output.rename(new.with_name(f"{new.name}.old"))
        new.rename(args.output)
        shutil.rmtree(new.with_name(f"{new.name}.old"), ignore_errors=True)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    print(f"{name}: {g.num_nodes()} nodes, {g.num_edges()} edges, in {args.num_parts} parts by {args.part_method}")
    print(table(stats))
    for k, limited in (("nodes", True), ("train_nodes", args.balance_train), ("edges", args.balance_edges)):
        if stats["imbalance"][k] > args.imbalance and limited and args.part_method in ("ew", "metis"):
            warn(f"no partition with at most {args.imbalance} times the mean of {k} in each part was found")
    if empty := [i for i, p in enumerate(stats["parts"]) if not p["train_nodes"]]:
        warn(f"no training nodes in part {', '.join(map(str, empty))}; ask for fewer parts")


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    main(check(arguments().parse_args()))
