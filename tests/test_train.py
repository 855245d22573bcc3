"""train_dist.py: scores, loss, gradients; and in real DistDGL jobs rows and inference against the whole graph."""
import json

import dgl
import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from conftest import FORK, free_ports, full_graph_logits, make_parts, random_graph, read_graph, run_hosts, write_bin, write_npz

import sampler
import train_dist
from train_dist import SAGE, class_counts, f1_scores, focal_loss, train_epoch


def f1_directly(pred, true, num_classes):
    """pred, true (n, C) bool: the definitions, class by class."""
    f1s, support, tps, fps, fns = [], [], 0, 0, 0
    for c in range(num_classes):
        tp, fp, fn = ((pred[:, c] & true[:, c]).sum(), (pred[:, c] & ~true[:, c]).sum(), (~pred[:, c] & true[:, c]).sum())
        tps, fps, fns = tps + tp, fps + fp, fns + fn
        if tp + fp + fn:
            precision, recall = tp / max(1, tp + fp), tp / max(1, tp + fn)
            f1s.append(2 * precision * recall / (precision + recall) if tp else 0.0)
            support.append(true[:, c].sum())
    return dict(micro=2 * tps / (2 * tps + fps + fns), macro=np.mean(f1s), weighted=np.average(f1s, weights=support))


@pytest.mark.parametrize("multilabel", [False, True])
def test_f1_of_summed_counts_equals_the_direct_computation(multilabel):
    rng = np.random.default_rng(0)
    logits = torch.tensor(rng.normal(size=(90, 6)))
    logits[:, 5] = -9                                               # a class that is never predicted nor true
    if multilabel:
        label = torch.tensor(rng.integers(0, 2, (90, 6)))
        label[:, 5] = 0
        pred, true = (logits > 0).numpy(), label.bool().numpy()
    else:
        label = torch.tensor(rng.integers(0, 5, 90))
        pred, true = (np.eye(6, dtype=bool)[i] for i in (logits.argmax(1), label))
    parts = (slice(0, 10), slice(10, 75), slice(75, 75), slice(75, 90))
    hosts = [class_counts(logits[part], label[part]) for part in parts]
    scores = f1_scores(sum(hosts))
    for name, value in f1_directly(pred, true, 6).items():
        assert scores[name] == pytest.approx(float(value)), name
    if not multilabel:
        assert scores["micro"] == pytest.approx(float((logits.argmax(1) == label).double().mean()))


def test_focal_loss():
    logits, label = torch.randn(7, 4, dtype=torch.double), torch.tensor([0, 1, 2, 3, 0, 1, 2])
    many = torch.tensor(np.random.default_rng(0).integers(0, 2, (7, 4)))
    torch.testing.assert_close(focal_loss(logits, label), F.cross_entropy(logits, label, reduction="sum"))
    torch.testing.assert_close(focal_loss(logits, many),
                               F.binary_cross_entropy_with_logits(logits, many.double(), reduction="sum"))
    p = logits.softmax(1)[torch.arange(7), label]
    torch.testing.assert_close(focal_loss(logits, label, 2.0), ((1 - p) ** 2 * -p.log()).sum())
    p = torch.where(many.bool(), logits.sigmoid(), 1 - logits.sigmoid())
    torch.testing.assert_close(focal_loss(logits, many, 0.5), ((1 - p) ** 0.5 * -p.log()).sum())


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0])
def test_confident_mistakes_have_a_gradient(gamma):
    """log(p + 1e-8), as the authors have it, has none."""
    for label in (torch.tensor([1]), torch.tensor([[0, 1]])):
        logits = torch.tensor([[90.0, -90.0]], requires_grad=True)
        focal_loss(logits, label, gamma).backward()
        assert torch.isfinite(logits.grad).all() and logits.grad[0, 1] < -0.9
        sure = torch.tensor([[-90.0, 90.0]], requires_grad=True)
        focal_loss(sure, label, gamma).backward()
        assert torch.isfinite(sure.grad).all()


class Recorder:
    """An optimiser that keeps the gradients instead of using them."""

    def __init__(self, model):
        self.model, self.grads = model, []

    def zero_grad(self):
        self.model.zero_grad()

    def step(self):
        self.grads.append(torch.cat([p.grad.flatten() for p in self.model.parameters()]).clone())


def gradients(rank, world, port, num_train, path):
    """The gradient of each step of an epoch, with num_train[rank] nodes on host `rank` and all their neighbours."""
    torch.set_num_threads(1)
    arrays = random_graph()
    g = dgl.to_bidirected(dgl.graph((arrays["src"], arrays["dst"]), num_nodes=150))
    feat, label = torch.tensor(arrays["feat"]), torch.tensor(arrays["label"])
    torch.manual_seed(0)
    model = SAGE(12, 8, 5, 2, 0.0)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
        model = torch.nn.parallel.DistributedDataParallel(model)
    sizes, steps = sampler.mini_epoch_sizes(num_train, 1, 20)
    nodes = torch.arange(sum(num_train[:rank]), sum(num_train[:rank + 1]))
    recorder = Recorder(model)
    batches = list(sampler.batches(nodes, None, sizes, steps, rank, sampler.generator(0, rank, 0)))
    train_epoch(model, recorder, g, feat, label, batches, [-1, -1], 0.0)
    torch.save(([b.tolist() for b, _ in batches], recorder.grads), f"{path}/{rank}")


@pytest.mark.parametrize("num_train", [[20, 20], [17, 40], [1, 30], [0, 25]])
def test_two_ranks_have_the_gradient_of_one(tmp_path, num_train, monkeypatch):
    """With half the batch each, and as well when one host has fewer nodes or none: every node counts the same."""
    port, = free_ports(1)
    ranks = [FORK.Process(target=gradients, args=(r, 2, port, num_train, str(tmp_path))) for r in range(2)]
    [r.start() for r in ranks]
    [r.join(60) for r in ranks]
    (seeds0, grads0), (seeds1, grads1) = (torch.load(tmp_path / str(r)) for r in range(2))
    arrays = random_graph()
    g = dgl.to_bidirected(dgl.graph((arrays["src"], arrays["dst"]), num_nodes=150))
    g.ndata["feat"], label = torch.tensor(arrays["feat"]), torch.tensor(arrays["label"])
    assert len(grads0) == len(grads1) == max(1, -(-max(num_train) // 20))
    for a, b, grad0, grad1 in zip(seeds0, seeds1, grads0, grads1):
        torch.manual_seed(0)
        model = SAGE(12, 8, 5, 2, 0.0)
        block = dgl.to_block(g, g.nodes())
        F.cross_entropy(model([block, block], g.ndata["feat"])[a + b], label[a + b]).backward()
        whole = torch.cat([p.grad.flatten() for p in model.parameters()])
        torch.testing.assert_close(grad0, whole, rtol=1e-4, atol=1e-6)
        assert torch.equal(grad0, grad1)


def look_around(args):
    """Runs on every host of a DistDGL job."""
    import personalize
    train_dist.check_files(args)
    g = train_dist.connect(args)
    dist.init_process_group("gloo")
    host = train_dist.Host(g)
    everything = torch.arange(g.num_nodes())
    torch.manual_seed(0)
    model = SAGE(host.feat.shape[1], 8, 5, args.num_layers, 0.5)
    inference = train_dist.Inference(host, 8, args.num_layers)
    logits = inference(model)
    dist.barrier()
    for p in model.parameters():
        p.data += 0.1
    again = inference(model)                                        # the buffers are written a second time
    torch.manual_seed(100 + int(host.part_id))                      # now every host has a model of its own
    own = SAGE(host.feat.shape[1], 8, 5, args.num_layers, 0.5)
    local = personalize.LocalGraph(host, args.num_layers)
    return dict(part=int(host.part_id), inner=host.inner, logits=logits, again=again, train_nodes=host.train_nodes,
                feat=host.feat[everything], label=host.label[everything], p=host.cbs_probabilities(),
                own=local.inference(own), reach=local.reach, edges=local.graph.num_edges(),
                state=(train_dist.disconnect(), own.state_dict())[1])


@pytest.fixture(scope="module", params=[(3, "undirected", 2), (2, "directed multi-label", 3), (1, "undirected", 1)],
                ids=lambda p: "{}-{}-layers{}".format(*p))
def job(request, tmp_path_factory):
    parts, kind, layers = request.param
    tmp = tmp_path_factory.mktemp("job")
    arrays = random_graph(multilabel="multi-label" in kind)
    data = write_bin(tmp / "g.bin", **arrays) if "directed m" in kind else write_npz(tmp / "g.npz", **arrays)
    config = make_parts(data, tmp / "parts", "--num_parts", parts)
    hosts = run_hosts(tmp, config, look_around, "--num_layers", layers, "--fan_out", ",".join(["25"] * layers))
    return arrays, torch.load(config.parent / "node_map.pt"), hosts, read_graph(data), layers


def test_every_host_reads_every_row(job):
    """Several hosts on one machine overwrite each other's shared memory unless they are kept apart."""
    arrays, node_map, hosts, *_ = job
    assert sorted(h["part"] for h in hosts) == list(range(len(hosts)))
    for h in hosts:
        assert np.array_equal(h["feat"], arrays["feat"][node_map])
        assert np.array_equal(h["label"], arrays["label"][node_map])


def test_each_host_trains_on_the_training_nodes_of_its_own_part(job):
    arrays, node_map, hosts, *_ = job
    for h in hosts:
        assert h["train_nodes"].tolist() == [n for n in h["inner"].tolist() if arrays["train_mask"][node_map[n]]]
    assert sum(len(h["train_nodes"]) for h in hosts) == arrays["train_mask"].sum()


def test_distributed_inference_equals_the_full_graph_forward_pass(job):
    arrays, node_map, hosts, g, layers = job
    torch.manual_seed(0)
    model = SAGE(12, 8, 5, layers, 0.5)
    for name in ("logits", "again"):
        whole = full_graph_logits(model, g)
        for h in hosts:
            torch.testing.assert_close(h[name], whole[node_map[h["inner"]]], rtol=1e-5, atol=1e-5)
        for p in model.parameters():
            p.data += 0.1


def test_personal_inference_equals_the_hosts_own_model_on_the_full_graph(job):
    arrays, node_map, hosts, g, layers = job
    for h in hosts:
        model = SAGE(12, 8, 5, layers, 0.5)
        model.load_state_dict(h["state"])
        torch.testing.assert_close(h["own"], full_graph_logits(model, g)[node_map[h["inner"]]], rtol=1e-5, atol=1e-5)


def test_local_graph_holds_what_the_model_can_see_and_no_more(job):
    arrays, node_map, hosts, g, layers = job
    for h in hosts:
        seen, reach = set(node_map[h["inner"]].tolist()), []
        edges = 0
        for _ in range(layers):
            reach.append(len(seen))
            edges = int(g.in_degrees(torch.tensor(sorted(seen))).sum())
            seen |= set(g.in_edges(torch.tensor(sorted(seen)))[0].tolist())
        assert h["reach"] == reach + [len(seen)] and h["edges"] == edges


def test_cbs_probabilities_of_a_host_use_global_degrees(job):
    arrays, node_map, hosts, g, _ = job
    u, v = g.edges()
    norm = sampler.column_norms(u, v, g.in_degrees(), 150)
    for h in hosts:
        original = node_map[h["train_nodes"]]
        label = torch.tensor(arrays["label"])[original]
        torch.testing.assert_close(h["p"], sampler.cbs_probabilities(norm[original], label))


BAD_FLAGS = {"--batch_size": "0", "--lr": "-1", "--dropout": "1", "--fan_out": "25", "--num_epochs": "x",
             "--sampler": "best", "--lambda": "nan", "--seed": "-1", "--epoch_fraction": "2", "--unknown": "1"}


@pytest.mark.parametrize("flag", BAD_FLAGS)
def test_bad_flags_are_one_line(flag, capfd):
    with pytest.raises(SystemExit) as e:
        train_dist.check(train_dist.arguments().parse_args([flag, BAD_FLAGS[flag]]))
    error = capfd.readouterr().err
    assert e.value.code == 2 and error.count("\n") == 1 and flag in error


def test_files_that_do_not_fit_are_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("DGL_DIST_MODE", "distributed")
    config = tmp_path / "g.json"
    config.write_text(json.dumps(dict(graph_name="g", num_parts=2)))
    hosts = tmp_path / "ip_config.txt"
    hosts.write_text("127.0.0.1 30050\n")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for part_config, ip_config, word in ((config, hosts, "2 parts"), (bad, hosts, "--part_config"),
                                         (config, tmp_path / "no", "--ip_config")):
        args = train_dist.arguments().parse_args(["--part_config", str(part_config), "--ip_config", str(ip_config)])
        with pytest.raises(SystemExit) as e:
            train_dist.check_files(args)
        error = capfd.readouterr().err
        assert e.value.code == 2 and error.count("\n") == 1 and word in error
