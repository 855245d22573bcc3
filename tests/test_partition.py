"""partition.py against formulas written out, and its directory read back through DGL."""
import json
import math
import os
import subprocess
import sys
import types
from collections import Counter

import dgl
import numpy as np
import pytest
import torch
from conftest import ROOT, make_parts, random_graph, read_graph, write_bin, write_npz

import partition


def entropy_by_hand(labels):
    return -sum(k / len(labels) * math.log2(k / len(labels)) for k in Counter(labels).values())


def test_entropy_single_label():
    label, part = torch.tensor([0, 0, 1, 1, 2, 2, 2, 0]), torch.tensor([0, 0, 0, 0, 1, 1, 1, 1])
    by_hand = [entropy_by_hand([0, 0, 1, 1]), entropy_by_hand([2, 2, 2, 0])]
    assert by_hand[0] == 1.0
    torch.testing.assert_close(partition.label_entropy(label, part, 3), torch.tensor(by_hand + [0.0], dtype=torch.double))
    assert partition.total_entropy(label, part, 3) == pytest.approx(sum(by_hand) / 2)


def test_entropy_multi_label():
    label = torch.tensor([[1, 0, 0], [1, 1, 0], [0, 1, 0], [0, 0, 0]])
    part = torch.tensor([0, 0, 0, 1])
    by_hand = entropy_by_hand([1, 1, 0]) + entropy_by_hand([0, 1, 1]) + 0
    torch.testing.assert_close(partition.label_entropy(label, part, 2), torch.tensor([by_hand, 0.0], dtype=torch.double))
    assert partition.total_entropy(label, part, 2) == pytest.approx(0.75 * by_hand)


@pytest.mark.parametrize("c", [0.5, 10, 0])
def test_edge_weights_equal_the_double_loop(c, tmp_path):
    g = partition.simple_view(read_graph(write_npz(tmp_path / "g.npz", **random_graph())))
    weight = partition.edge_weights(g, (x := torch.tensor(random_graph()["feat"])), c)
    degree = Counter(g.edges()[0].tolist())
    pairs = dict(zip(zip(*(t.tolist() for t in g.edges())), weight.tolist()))
    assert len(pairs) == g.num_edges() and all(u != v for u, v in pairs) and (g.in_degrees() == 0).any()
    clamped = 0
    for (u, v), w in pairs.items():
        norm = float(x[u].double().norm() * x[v].double().norm())
        cos = float(x[u].double() @ x[v].double()) / norm if norm else 0.0
        exact = 100 * (c * cos + 1 - (math.exp(-25 / degree[u]) + math.exp(-25 / degree[v])) / 2)
        assert w == max(1, round(exact)) and isinstance(w, int)
        assert w == pairs[v, u]
        clamped += exact < 0.5
    assert clamped > 0 if c == 10 else True                         # negative similarity did occur


def test_simple_view_is_the_same_for_every_way_to_write_a_graph():
    edges = [(0, 1), (1, 2), (3, 1)]
    views = []
    for extra in ([], [(1, 0)], [(0, 1), (0, 1)], [(2, 2)]):
        u, v = zip(*edges, *extra)
        views.append(partition.simple_view(dgl.graph((u, v), num_nodes=5)))
    for view in views:
        assert sorted(zip(*(t.tolist() for t in view.edges()))) == sorted(edges + [(v, u) for u, v in edges])
        assert view.num_nodes() == 5


@pytest.mark.parametrize("multilabel", [False, True])
@pytest.mark.parametrize("method", ["ew", "metis", "random", "dgl"])
def test_directory_read_back_through_dgl(tmp_path, method, multilabel, monkeypatch):
    arrays = random_graph(multilabel=multilabel)
    assigned = {}
    assign = partition.assign
    monkeypatch.setattr(partition, "assign", lambda *args: assigned.setdefault("part", assign(*args)))
    data = write_npz(tmp_path / "g.npz", **arrays)
    config = make_parts(data, tmp_path / "parts", "--num_parts", 3, "--part_method", method)
    node_map = torch.load(config.parent / "node_map.pt")
    assert sorted(node_map.tolist()) == list(range(150))
    stats, edges, seen = json.loads((config.parent / "stats.json").read_text()), [], []
    for i in range(3):
        part, feats, _, book, *_ = dgl.distributed.load_partition(str(config), i)
        inner = part.ndata["inner_node"].bool()
        new = part.ndata[dgl.NID][inner]
        original = node_map[new]
        seen += original.tolist()
        assert (book.nid2partid(new) == i).all()
        if method != "dgl":
            assert (assigned["part"][original] == i).all()          # every node lies where METIS put it
        for name in ("feat", "label", *partition.MASKS):            # row by row, exactly as given
            assert np.array_equal(feats[f"_N/{name}"].numpy(), arrays[name][original]), name
        u, v = (node_map[part.ndata[dgl.NID][t[part.edata["inner_edge"].bool()]]] for t in part.edges())
        edges += list(zip(u.tolist(), v.tolist()))
        train = torch.tensor(arrays["train_mask"])[original]
        assert stats["parts"][i] == dict(entropy=pytest.approx(float(partition.label_entropy(
            torch.tensor(arrays["label"].astype(int))[original[train]], torch.zeros(int(train.sum()), dtype=int), 1))),
            nodes=len(original), train_nodes=int(train.sum()), edges=len(u), halo_nodes=int((~inner).sum()))
    pairs = set(zip(arrays["src"].tolist(), arrays["dst"].tolist()))
    both = pairs | {(v, u) for u, v in pairs}
    assert len(edges) == len(both) and set(edges) == both           # each direction of each edge once
    assert sorted(seen) == list(range(150))
    ranges = json.loads(config.read_text())["node_map"]["_N"]
    home = {n: i for i in range(3) for n in node_map[slice(*ranges[i])].tolist()}
    assert stats["edge_cut"] == pytest.approx(np.mean([home[u] != home[v] for u, v in both]))


def test_ew_and_metis_differ_in_weights_only(tmp_path):
    """With weights that carry no information EW is METIS: the same call, the same parts."""
    arrays = random_graph()
    g = partition.simple_view(read_graph(write_npz(tmp_path / "g.npz", **arrays)))
    ones = torch.full((g.num_edges(),), 1)
    assert torch.equal(partition.metis(g, 4, ones, seed=3), partition.metis(g, 4, None, seed=3))


@pytest.mark.parametrize("method", ["ew", "metis", "random"])     # DGL's own METIS is not reproducible
def test_same_seed_same_bytes(tmp_path, method):
    data = write_npz(tmp_path / "g.npz", **random_graph())
    for name in "ab":
        make_parts(data, tmp_path / name, "--part_method", method, "--seed", 5)
    files = sorted(p.relative_to(tmp_path / "a") for p in (tmp_path / "a").rglob("*") if p.is_file())
    assert len(files) == 4 * 3 + 3
    for f in files:
        if f.name != "stats.json":                                  # it holds times
            assert (tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes(), f


def test_features_are_written_as_given(tmp_path):
    """The authors' EW normalises them in place, so that the arms of an ablation train on different inputs."""
    data = write_npz(tmp_path / "g.npz", **random_graph())
    feats = {}
    for method in ("ew", "metis"):
        config = make_parts(data, tmp_path / method, "--part_method", method)
        node_map = torch.load(config.parent / "node_map.pt")
        parts = [dgl.distributed.load_partition(str(config), i)[1]["_N/feat"] for i in range(4)]
        feats[method] = torch.empty(150, 12).index_copy_(0, node_map, torch.cat(parts))
    assert torch.equal(feats["ew"], feats["metis"])


def corrupt(path, seed):
    """Overwrites a few bytes of the file, or cuts it off."""
    rng = np.random.default_rng(seed)
    raw = bytearray(path.read_bytes())
    if seed % 3 == 0:
        raw = raw[:rng.integers(len(raw))]
    else:
        for i in rng.integers(0, len(raw) if seed % 3 == 1 else 400, 4):
            raw[i] = rng.integers(256)
    path.write_bytes(raw)


BAD = {
    "no such file": (lambda a: None, [], "--dataset"),
    "not npz": (lambda a: None, [], "--dataset"),
    "truncated": (lambda a: None, [], "--dataset"),
    "unknown dataset": (lambda a: None, ["--dataset", "cora"], "--dataset cora"),
    "synthetic of no size": (lambda a: None, ["--dataset", "synthetic:10,0,2"], "--dataset synthetic:10,0,2"),
    "not bin": (lambda a: None, ["--dataset", __file__ + ".bin"], "--dataset"),
    "no features": (lambda a: a.update(feat=a["feat"][:, :0]), [], "feat"),
    "infinite": (lambda a: a["feat"].__setitem__((0, 0), np.inf), [], "feat"),
    "text": (lambda a: a.update(feat=a["feat"].astype(str)), [], "feat"),
    "fractional edge end": (lambda a: a.update(src=a["src"] + 0.5), [], "src"),
    "fractional class": (lambda a: a.update(label=a["label"] + 0.5), [], "label"),
    "no label": (lambda a: a.update(label=np.full(150, np.nan)), [], "train_mask"),
    "multi-label 2": (lambda a: a.update(label=np.full((150, 3), 2)), [], "label"),
    "mask 2": (lambda a: a.update(val_mask=np.full(150, 2)), [], "val_mask"),
    "mask of another length": (lambda a: a.update(test_mask=a["test_mask"][1:]), [], "test_mask"),
    "split over 100": (lambda a: None, ["--split", "50/50/50"], "--split"),
    "output under a file": (lambda a: None, ["--output", __file__ + "/parts"], "--output"),
    "output not writable": (lambda a: None, ["--output", "/proc/parts"], "--output"),
    "refine below METIS": (lambda a: None, ["--refine", "0.9"], "--refine 0.9"),
    "refine random": (lambda a: None, ["--part_method", "random", "--refine", "1.2"], "--refine"),
    "array missing": (lambda a: a.pop("feat"), [], "feat"),
    "lengths differ": (lambda a: a.update(dst=a["dst"][:-1]), [], "dst"),
    "rows differ": (lambda a: a.update(feat=a["feat"][:-1]), [], "feat"),
    "edge end too large": (lambda a: a["src"].__setitem__(0, 150), [], "src"),
    "edge end negative": (lambda a: a["dst"].__setitem__(0, -1), [], "dst"),
    "nan": (lambda a: a["feat"].__setitem__((0, 0), np.nan), [], "feat"),
    "object": (lambda a: a.update(label=np.array([None] * 150)), [], "--dataset"),
    "negative class": (lambda a: a["label"].__setitem__(0, -2), [], "label"),
    "class too large": (lambda a: a["label"].__setitem__(0, 10**12), [], "label"),
    "huge feature": (lambda a: a["feat"].__setitem__((0, 0), 1e37), [], "feat"),
    "no edge": (lambda a: a.update(src=a["src"][:0], dst=a["dst"][:0]), [], "src"),
    "no training nodes": (lambda a: a["train_mask"].fill(False), [], "train_mask"),
    "too many parts": (lambda a: None, ["--num_parts", "151"], "--num_parts 151"),
    "no parts": (lambda a: None, ["--num_parts", "0"], "--num_parts 0"),
    "unknown method": (lambda a: None, ["--part_method", "best"], "best"),
    "c not a number": (lambda a: None, ["--c", "nan"], "--c nan"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line(tmp_path, case, capfd):
    change, flags, name = BAD[case]
    change(arrays := random_graph())
    path = write_npz(tmp_path / "g.npz", **arrays)
    if case == "no such file":
        path.unlink()
    if case == "not npz":
        path.write_text("src,dst\n0,1\n")
    if case == "truncated":
        path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(SystemExit) as e:
        make_parts(path, tmp_path / "parts", *flags)
    error = capfd.readouterr().err
    assert e.value.code == 2 and error.count("\n") == 1 and name in error
    assert [p.name for p in tmp_path.iterdir() if p != path] == []


def outcome(dataset, output, capfd, *flags):
    """-> stats.json without times and what was said on stderr; the stats are None where it ended with one line"""
    try:
        config = make_parts(dataset, output, *flags)
    except SystemExit as e:
        error = capfd.readouterr().err
        assert e.code == 2 and error.count("\n") == 1, error
        assert not output.exists()
        return None, error
    stats = json.loads((config.parent / "stats.json").read_text())
    return {k: stats[k] for k in ("parts", "total_entropy", "val_entropy", "edge_cut")}, capfd.readouterr().err


def test_corrupted_files(tmp_path, capfd):
    """30 of them: each is refused in one line, or what it says is still all there."""
    good, _ = outcome(write_npz(tmp_path / "g.npz", **random_graph()), tmp_path / "good", capfd)
    refused = 0
    for seed in range(30):
        path = write_npz(tmp_path / "g.npz", **random_graph())
        corrupt(path, seed)
        stats, error = outcome(path, tmp_path / f"p{seed}", capfd)
        assert stats in (None, good), seed
        refused += stats is None
    assert refused > 20


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small file system")
def test_full_disk(tmp_path, capfd):
    data, small = write_npz(tmp_path / "g.npz", **random_graph(4000)), tmp_path / "small"
    small.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "tmpfs", small]).returncode:
        pytest.skip("can't mount")
    try:
        stats, error = outcome(data, small / "parts", capfd)
        assert stats is None and "--output" in error and "disk full" in error and list(small.iterdir()) == []
    finally:
        subprocess.run(["umount", small], check=True)


@pytest.mark.parametrize("case, change, flags, said", [
    ("one part", lambda a: None, ["--num_parts", "1"], ""),
    ("overlap", lambda a: a["val_mask"].__setitem__(np.flatnonzero(a["train_mask"])[:7], True), [], "7 nodes are in more than one"),
    ("zero features", lambda a: a["feat"].fill(0), [], "feat is zero everywhere"),
    ("int features", lambda a: a.update(feat=a["feat"].round().astype(int)), [], ""),
    ("bool features", lambda a: a.update(feat=a["feat"] > 0), [], ""),
    ("float16 features", lambda a: a.update(feat=a["feat"].astype(np.float16)), [], ""),
    ("int8 masks in columns", lambda a: a.update({k: a[k].astype(np.int8)[:, None] for k in partition.MASKS}), [], ""),
    ("float masks", lambda a: a.update({k: a[k].astype(float) for k in partition.MASKS}), [], ""),
    ("labels in a column", lambda a: a.update(label=a["label"][:, None]), [], ""),
    ("gaps between classes", lambda a: a.update(label=20 * a["label"]), [], ""),
    ("nan labels", lambda a: a.update(label=np.where(np.any([a[k] for k in partition.MASKS], 0), a["label"], np.nan)), [], ""),
    ("training nodes without a label", lambda a: a["label"].__setitem__(np.flatnonzero(a["train_mask"])[:3], -1), [],
     "3 nodes of the masks have no label"),
    ("no training nodes in a part", lambda a: a["train_mask"].__setitem__(
        slice(np.flatnonzero(a["train_mask"])[1], 150), False), [], "no training nodes in part"),
    ("split", lambda a: [a.pop(k) for k in partition.MASKS], ["--split", "50/25/25"], ""),
    ("two trainers", lambda a: None, ["--num_trainers_per_machine", "2"], ""),
    ("all flags", lambda a: None, ["--balance_train", "--balance_edges", "--refine", "1.3", "--tries", "2"],
     None),
], ids=lambda x: x if isinstance(x, str) else "")
def test_unusual_input_works(tmp_path, capfd, case, change, flags, said):
    change(arrays := random_graph())
    data = write_npz(tmp_path / "g.npz", **arrays)
    stats, error = outcome(data, tmp_path / "parts", capfd, *flags)
    assert stats is not None, error
    assert (said in error and error.count("\n") == bool(said)) if said is not None else True, error
    verify(tmp_path / "parts" / "g.json", read_graph(data, *flags))


def verify(config, g):
    """Every node and edge of g is in the directory exactly once, with its data (what DGL's verify_partitions.py checks)."""
    node_map, seen, edges = torch.load(config.parent / "node_map.pt"), [], []
    for i in range(json.loads(config.read_text())["num_parts"]):
        part, feats, _, book, *_ = dgl.distributed.load_partition(str(config), i)
        original, inner = node_map[part.ndata[dgl.NID]], part.ndata["inner_node"].bool()
        assert (book.nid2partid(part.ndata[dgl.NID][inner]) == i).all()
        u, v = part.edges()
        owned = part.edata["inner_edge"].bool()
        assert inner[v[owned]].all()                                # an edge lies with its destination
        edges += zip(original[u[owned]].tolist(), original[v[owned]].tolist())
        seen += original[inner].tolist()
        for k in ("feat", "label", *partition.MASKS):
            assert torch.equal(feats[f"_N/{k}"].to(g.ndata[k].dtype), g.ndata[k][original[inner]]), k
    assert sorted(seen) == list(range(g.num_nodes()))
    assert Counter(edges) == Counter(zip(*(t.tolist() for t in g.edges())))


@pytest.mark.parametrize("method", ["ew", "metis", "random", "dgl"])
@pytest.mark.parametrize("multilabel", [False, True])
def test_directed_multigraph_is_kept_as_given(tmp_path, method, multilabel):
    arrays = random_graph(multilabel=multilabel)
    config = make_parts(data := write_bin(tmp_path / "g.bin", **arrays), tmp_path / "parts", "--part_method", method)
    g = read_graph(data)
    assert Counter(zip(*(t.tolist() for t in g.edges()))) == Counter(zip(arrays["src"].tolist(), arrays["dst"].tolist()))
    verify(config, g)


def test_trainers_of_a_machine_share_its_part(tmp_path):
    config = make_parts(write_npz(tmp_path / "g.npz", **random_graph()), tmp_path / "parts", "--num_parts", 2,
                        "--num_trainers_per_machine", 2)
    for i in range(2):
        trainer = dgl.distributed.load_partition(str(config), i)[1]["_N/trainer_id"]
        assert set((trainer // 2).tolist()) == {i} and set(trainer.tolist()) == {2 * i, 2 * i + 1}


class Fake(list):
    """A dataset of one graph"""
    def __init__(self, g, split=None):
        super().__init__([g])
        self.split = split

    def get_idx_split(self):
        return self.split


@pytest.mark.parametrize("name, part_method, c", [("flickr", "ew", 10), ("yelp", "ew", 0.1), ("reddit", "ew", 0.5),
                                                  ("ogbn-products", "ew", 0.5), ("ogbn-papers100M", "metis", 0.5)])
def test_graphs_of_the_paper(tmp_path, monkeypatch, capfd, name, part_method, c):
    """Fakes of the shape that dgl.data and ogb give"""
    arrays = random_graph(multilabel=name == "yelp")
    g = dgl.graph((arrays["src"], arrays["dst"]), num_nodes=150)
    if name != "ogbn-papers100M":                                   # that one is directed
        g = dgl.to_bidirected(g)
    g.ndata["feat"], label = torch.tensor(arrays["feat"]), torch.tensor(arrays["label"])
    masks = {k: torch.tensor(arrays[k]) for k in partition.MASKS}
    if name.startswith("ogbn"):
        if name == "ogbn-papers100M":                               # float classes, NaN for those in no split
            label = label.float().masked_fill(~torch.stack([*masks.values()]).any(0), math.nan)
        fake = Fake((g, label[:, None]), dict(zip(("train", "valid", "test"), (m.nonzero().flatten() for m in masks.values()))))
        module = types.ModuleType("ogb.nodeproppred")
        module.DglNodePropPredDataset = lambda asked, root: fake if asked == name else None
        monkeypatch.setitem(sys.modules, "ogb", types.ModuleType("ogb"))
        monkeypatch.setitem(sys.modules, "ogb.nodeproppred", module)
    else:
        g.ndata.update(label=label.float() if name == "yelp" else label, **masks)
        monkeypatch.setattr(dgl.data, f"{name.capitalize()}Dataset", lambda: Fake(g))
    config = make_parts(name, tmp_path / "parts")
    stats = json.loads((tmp_path / "parts" / "stats.json").read_text())
    assert stats["arguments"]["part_method"] == part_method and stats["arguments"]["c"] == c
    seen = read_graph(name)
    known = torch.stack([*masks.values()]).any(0) if name == "ogbn-papers100M" else torch.ones(150, dtype=torch.bool)
    assert torch.equal(seen.ndata["label"][known], torch.tensor(arrays["label"])[known].long())
    assert (seen.ndata["label"][~known] == -1).all() and all(torch.equal(seen.ndata[k], masks[k]) for k in masks)
    assert torch.equal(torch.stack(seen.edges()), torch.stack(g.edges()))
    verify(config, seen)


def test_ogb_that_is_not_installed_is_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb", None)
    stats, error = outcome("ogbn-products", tmp_path / "parts", capfd)
    assert stats is None and "pip install ogb" in error


def test_labels_that_are_to_be_predicted_are_not_looked_at(tmp_path):
    """Other validation and test labels, the same parts, whatever the flags"""
    arrays, parts = random_graph(), []
    flags = ["--refine", "1.3", "--balance_train", "--balance_edges", "--tries", "2"]
    for name in "ab":
        config = make_parts(write_npz(tmp_path / f"{name}.npz", **arrays), tmp_path / name, *flags)
        parts.append(torch.load(config.parent / "node_map.pt"))
        arrays["label"] = np.where(arrays["train_mask"], arrays["label"], (arrays["label"] + 1) % 5)
    assert torch.equal(*parts)


def test_expected_classes_by_hand():
    g = dgl.to_bidirected(dgl.graph(([0, 1, 2, 3], [1, 2, 3, 0])))
    label, train = torch.tensor([1, 1, 0, 1]), torch.tensor([True, True, True, False])
    q = partition.expected_classes(g, torch.eye(4), label, train)
    torch.testing.assert_close(q[:3], torch.eye(2)[label[:3]])      # known, the fourth is guessed
    torch.testing.assert_close(q.sum(1), torch.ones(4))
    assert 0 < q[3, 0] < 1


@pytest.mark.parametrize("method", ["metis", "ew"])
def test_balance_and_refine_keep_their_promises(tmp_path, method):
    """At 1500 nodes with hubs: every balanced quantity within the limit, a lower entropy, no more cut than allowed."""
    arrays, stats = random_graph(1500, seed=1), {}
    hubs = np.random.default_rng(0).integers(0, 60, (2, 6000))      # an eighth of the edges among 60 nodes
    arrays.update(src=np.append(arrays["src"], hubs[0]), dst=np.append(arrays["dst"], hubs[1]))
    data, balance = write_npz(tmp_path / "g.npz", **arrays), ["--balance_train", "--balance_edges"]
    for name, flags in (("plain", []), ("balanced", balance), ("refined", [*balance, "--refine", "1.3"])):
        config = make_parts(data, tmp_path / name, "--part_method", method, *flags)
        stats[name] = json.loads((config.parent / "stats.json").read_text())
    assert max(stats["plain"]["imbalance"].values()) > 1.1
    for name in ("balanced", "refined"):
        assert max(stats[name]["imbalance"].values()) <= 1.1
    assert stats["refined"]["total_entropy"] < 0.9 * stats["balanced"]["total_entropy"]
    assert stats["refined"]["val_entropy"] < stats["balanced"]["val_entropy"]


def test_tries_keep_the_lowest_entropy(tmp_path):
    data = write_npz(tmp_path / "g.npz", **random_graph(400))
    entropy = [json.loads((make_parts(data, tmp_path / "p", "--seed", seed, "--tries", tries).parent / "stats.json").read_text())
               ["total_entropy"] for seed, tries in ((0, 1), (1, 1), (2, 1), (0, 3))]
    assert entropy[3] == min(entropy[:3]) and len(set(entropy[:3])) > 1


def test_interrupted_run_leaves_the_old_partition_whole(tmp_path, monkeypatch):
    data = write_npz(tmp_path / "g.npz", **random_graph())
    config = make_parts(data, tmp_path / "parts")
    before = {p: p.read_bytes() for p in config.parent.rglob("*") if p.is_file()}
    monkeypatch.setattr(partition, "statistics", lambda *_: sys.exit(143))     # as on SIGTERM: all is written but stats.json
    with pytest.raises(SystemExit):
        make_parts(data, tmp_path / "parts", "--seed", 1)
    assert {p: p.read_bytes() for p in config.parent.rglob("*") if p.is_file()} == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["g.npz", "parts"]


def test_synthetic_graph(tmp_path):
    g = read_graph("synthetic:2000,20,5")
    assert g.num_nodes() == 2000 and 0.9 * 40000 < g.num_edges() <= 40000 and g.ndata["feat"].shape == (2000, 100)
    assert set(g.ndata["label"].tolist()) == set(range(5))
    assert [int(g.ndata[k].sum()) for k in partition.MASKS] == [1000, 500, 500]
    assert torch.equal(g.edges()[0], read_graph("synthetic:2000,20,5").edges()[0])


@pytest.mark.parametrize("beside", ["nothing", "stats.json", "a whole partition"])
def test_output_that_is_no_partition_is_left_alone(tmp_path, beside):
    data, mine = write_npz(tmp_path / "g.npz", **random_graph()), tmp_path / "mine"
    make_parts(data, mine) if beside == "a whole partition" else mine.mkdir()
    if beside == "stats.json":
        (mine / "stats.json").write_text("{}")
    (mine / "thesis.txt").write_text("text")
    with pytest.raises(SystemExit):
        make_parts(data, mine)
    assert (mine / "thesis.txt").read_text() == "text"


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_many_isolated_nodes(tmp_path, share):
    """They get no part of their own, which DGL could not write, and keep the parts equal."""
    arrays = random_graph(400)
    keep = (arrays["src"] < 400 * (1 - share)) & (arrays["dst"] < 400 * (1 - share))
    arrays.update(src=arrays["src"][keep], dst=arrays["dst"][keep])
    for method in ("ew", "metis"):
        config = make_parts(write_npz(tmp_path / "g.npz", **arrays), tmp_path / "p", "--part_method", method)
        sizes = [p["nodes"] for p in json.loads((config.parent / "stats.json").read_text())["parts"]]
        assert sum(sizes) == 400 and max(sizes) <= 110


def test_links_and_names_that_clash(tmp_path):
    data = write_npz(tmp_path / "stats.npz", **random_graph())
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for _ in range(2):
        make_parts(data, tmp_path / "link")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / "graph.json").exists()


def test_benchmark(tmp_path):
    """Its commands in the README, on small graphs."""
    for name in ("amazon_computers", "pubmed"):
        write_npz(tmp_path / f"{name}.npz", **random_graph(400))

    def benchmark(*flags):
        done = subprocess.run([sys.executable, ROOT / "tests/benchmark.py", *flags, "--data", tmp_path, "--results",
                               tmp_path / "results.jsonl"], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    table = benchmark("partitions", "--seeds", "1", "--num_parts", "2")
    assert table.count("| refined |") == 2 and table.count("on average over METIS") == 6
    assert table == benchmark("partitions", "--seeds", "1", "--num_parts", "2")     # from what was kept, times too
    assert benchmark("weights").count("; 0 of ") == 2                               # weights that differ from the loop's
    assert "times as long" in benchmark("scale", "--dataset", "synthetic:2000,20,5")


def test_command_line(tmp_path):
    """The command in the README and in the file's header, with another output."""
    done = subprocess.run([sys.executable, "partition.py", "--dataset", "tests/data/debian.npz", "--num_parts", "4",
                           "--output", str(tmp_path / "parts")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "total entropy" in done.stdout, done.stderr
    stats = json.loads((tmp_path / "parts" / "stats.json").read_text())
    assert sum(p["nodes"] for p in stats["parts"]) == 63436 and stats["total_entropy"] < 4.3 and stats["edge_cut"] < 0.2
