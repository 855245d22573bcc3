"""partition.py against formulas written out, and its directory read back through DGL."""
import json
import math
import subprocess
import sys
from collections import Counter

import dgl
import numpy as np
import pytest
import torch
from conftest import ROOT, make_parts, random_graph, read_graph, write_npz

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
    use = partition.use_assignment
    monkeypatch.setattr(partition, "use_assignment", lambda part: use(assigned.setdefault("part", part)))
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


BAD = {
    "no such file": (lambda a: None, [], "--dataset"),
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
    with pytest.raises(SystemExit) as e:
        make_parts(path, tmp_path / "parts", *flags)
    error = capfd.readouterr().err
    assert e.value.code == 2 and error.count("\n") == 1 and name in error
    assert [p.name for p in tmp_path.iterdir() if p != path] == []


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


def test_command_line(tmp_path):
    """The command in the README and in the file's header, with another output."""
    done = subprocess.run([sys.executable, "partition.py", "--dataset", "tests/data/debian.npz", "--num_parts", "4",
                           "--output", str(tmp_path / "parts")], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "total entropy" in done.stdout, done.stderr
    stats = json.loads((tmp_path / "parts" / "stats.json").read_text())
    assert sum(p["nodes"] for p in stats["parts"]) == 63436 and stats["total_entropy"] < 4.3 and stats["edge_cut"] < 0.2
