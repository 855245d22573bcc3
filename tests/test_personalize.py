"""personalize.py: the proximal term and the report. Its exact evaluation needs a DistDGL job: see test_train.py."""
import json

import dgl
import pytest
import torch
from conftest import random_graph

import personalize
import sampler
import train_dist
from train_dist import SAGE, class_counts


def small_host():
    """A host that has the whole graph, without DistDGL."""
    arrays = random_graph()
    g = dgl.to_bidirected(dgl.graph((arrays["src"], arrays["dst"]), num_nodes=150))
    masks = {k: torch.tensor(arrays[f"{k}_mask"]) for k in ("train", "val", "test")}
    return g, torch.tensor(arrays["feat"]), torch.tensor(arrays["label"]), masks


def fine_tune(lambda_, optimizer=torch.optim.SGD, lr=0.05, epochs=3, penalized=True):
    g, feat, label, masks = small_host()
    torch.manual_seed(0)
    model = SAGE(12, 8, 5, 2, 0.0)
    anchors = [w.detach().clone() for w in model.parameters()]
    opt = optimizer(model.parameters(), lr=lr)
    sizes, steps = sampler.mini_epoch_sizes([int(masks["train"].sum())], 1, 30)
    for epoch in range(epochs):
        batches = sampler.batches(masks["train"].nonzero().flatten(), None, sizes, steps, 0, sampler.generator(0, 0, epoch))
        train_dist.train_epoch(model, opt, g, feat, label, batches, [-1, -1], 0.0,
                               (lambda: personalize.proximal(model.parameters(), anchors, lambda_)) if penalized else None)
    return anchors, [w.detach() for w in model.parameters()]


def test_lambda_0_is_plain_fine_tuning():
    (_, a), (_, b) = fine_tune(0.0), fine_tune(0.0, penalized=False)
    for x, y in zip(a, b):                                          # equal but for the order of sums in two threads
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-6)


def test_huge_lambda_leaves_the_weights():
    anchors, free = fine_tune(0.0)
    assert max(float((a - w).abs().max()) for a, w in zip(anchors, free)) > 0.05
    anchors, held = fine_tune(1e6, lr=1e-7)                         # SGD is stable while 2 lambda lr < 2
    assert all(torch.allclose(a, w, atol=1e-4) for a, w in zip(anchors, held))


def test_proximal_term_and_its_gradient():
    w, w_g = torch.tensor([1.0, -2.0], requires_grad=True), torch.tensor([0.5, 0.0])
    penalty = personalize.proximal([w], [w_g], 0.1)
    penalty.backward()
    assert float(penalty) == pytest.approx(0.1 * (0.25 + 4))
    torch.testing.assert_close(w.grad, 2 * 0.1 * (w.detach() - w_g))


def result(host, nodes, wrong):
    label = torch.arange(nodes) % 5
    logits = torch.eye(5)[(label + (torch.arange(nodes) < wrong)) % 5]
    counts = {s: class_counts(logits, label) for s in ("val", "test")}
    return dict(host=host, entropy=None, train_nodes=7, epoch=1, seconds=1.5 + host, ended=9.0 + host,
                counts={"global": counts, "personal": counts}, rows=[dict(phase="personalise", host=host, epoch=1)])


def test_report_sums_counts_and_names_who_is_missing(tmp_path, capfd):
    with pytest.raises(SystemExit):
        personalize.report(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(dict(world_size=3, started=0)))
    (tmp_path / "metrics.jsonl").write_text('{"phase": "generalise"}\n{"phase": "personalise", "host": 9}\n')
    torch.save(dict(seconds=2.0, test={}), tmp_path / "global.pt")
    for host, nodes, wrong in ((0, 20, 4), (2, 60, 30)):
        torch.save(result(host, nodes, wrong), tmp_path / f"host{host}.pt")
    assert personalize.report(tmp_path) == [1]
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["missing"] == [1] and [h["host"] for h in summary["hosts"]] == [0, 2]
    assert summary["personal"]["test"]["micro"] == pytest.approx((16 + 30) / 80)            # not (.8 + .5) / 2
    assert summary["seconds"]["phase2"] == 3.5 and summary["seconds"]["phase1"] == 2.0
    assert summary["seconds"]["wall"] == 11.0                       # whenever it is reported
    assert "host(s) 1" in capfd.readouterr().out
    rows = [json.loads(r) for r in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [r.get("host") for r in rows] == [None, 0, 2]            # of this run only
    torch.save(result(1, 20, 0), tmp_path / "host1.pt")
    assert personalize.report(tmp_path) == []
