"""./launch.sh as a user types it, with everything real, from METIS to the report; and its failures."""
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from conftest import ROOT, full_graph_logits, random_graph, read_graph, write_npz

from train_dist import SAGE, class_counts, f1_scores

SMALL = "--hosts 2 --num_epochs 12 --sync_fraction 0.5 --batch_size 40 --num_hidden 16 --seed 3".split()


def launch(*flags, cwd=ROOT):
    return subprocess.Popen([str(ROOT / "launch.sh"), *map(str, flags)], cwd=cwd, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def leftovers(out):
    """Processes and listening ports of the job whose output directory is `out`, and its files in /dev/shm."""
    ports = [int(line.split()[1]) for f in Path(out).glob("ip_config.txt") for line in f.read_text().splitlines()]
    processes = [p.pid for p in psutil.process_iter(["cmdline"]) if str(out) in " ".join(p.info["cmdline"] or [])]
    listening = [c.laddr.port for c in psutil.net_connections("tcp") if c.status == "LISTEN" and c.laddr.port in ports]
    shared = [f.name for f in Path("/dev/shm").iterdir() if any(f".{port}." in f.name for port in ports)]
    return processes + listening + shared


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_npz(tmp_path_factory.mktemp("data") / "toy.npz", **random_graph(n=400, classes=6))


@pytest.fixture(scope="module")
def two_runs(data, tmp_path_factory):
    """The same job twice at the same time, in two directories."""
    outs = [tmp_path_factory.mktemp("run") / "out" for _ in range(2)]
    jobs = [launch("--dataset", data, "--out", out, *SMALL) for out in outs]
    done = [job.communicate(timeout=240) for job in jobs]
    for job, (_, error) in zip(jobs, done):
        assert job.returncode == 0, error
    return outs, [text for text, _ in done]


def load(out, data):
    g = read_graph(data)
    node_map = torch.load(out / "parts" / "node_map.pt")
    ranges = json.loads((out / "parts" / "toy.json").read_text())["node_map"]["_N"]
    owned = [node_map[a:b] for a, b in ranges]
    return g, owned, torch.load(out / "global.pt"), json.loads((out / "summary.json").read_text())


def test_global_scores_are_those_of_the_global_model_on_the_whole_graph(two_runs, data):
    g, owned, state, summary = load(two_runs[0][0], data)
    model = SAGE(**state["shape"])
    model.load_state_dict(state["model"])
    logits = full_graph_logits(model, g)
    for split in ("val", "test"):
        mask = g.ndata[f"{split}_mask"]
        assert summary["global"][split] == pytest.approx(f1_scores(class_counts(logits[mask], g.ndata["label"][mask])))
    assert state["test"] == pytest.approx(summary["global"]["test"])
    assert state["val"] == pytest.approx(summary["global"]["val"])


def test_personal_scores_are_those_of_each_hosts_model_on_its_own_nodes(two_runs, data):
    out = two_runs[0][0]
    g, owned, _, summary = load(out, data)
    total = {split: 0 for split in ("val", "test")}
    for i, nodes in enumerate(owned):
        host = torch.load(out / f"host{i}.pt")
        model = SAGE(**torch.load(out / "global.pt")["shape"])
        model.load_state_dict(host["model"])
        logits = full_graph_logits(model, g)
        for split in total:
            mine = nodes[g.ndata[f"{split}_mask"][nodes]]
            counts = class_counts(logits[mine], g.ndata["label"][mine])
            assert torch.equal(counts, host["counts"]["personal"][split])
            total[split] += counts
        assert summary["hosts"][i]["train_nodes"] == int(g.ndata["train_mask"][nodes].sum())
    for split, counts in total.items():
        assert summary["personal"][split] == pytest.approx(f1_scores(counts))


def test_no_hosts_validation_score_falls(two_runs):
    for out in two_runs[0]:
        for host in json.loads((out / "summary.json").read_text())["hosts"]:
            assert host["personal"]["val"]["micro"] >= host["global"]["val"]["micro"]


def test_results_as_data(two_runs):
    out = two_runs[0][0]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert [r["epoch"] for r in rows if r["phase"] == "generalise"] == list(range(1, 7))
    for i in range(2):
        assert [r["epoch"] for r in rows if r["phase"] == "personalise" and r["host"] == i] == list(range(1, 7))
    for r in rows:
        assert {"loss", "val", "seconds", "samples_per_second", "peak_memory_gb"} <= set(r)
    config = json.loads((out / "config.json").read_text())
    assert config["seed"] == 3 and config["world_size"] == 2 and config["dgl"] == "2.1.0" and config["lambda"] == 1e-5
    summary = json.loads((out / "summary.json").read_text())
    assert {"global", "personal", "seconds", "hosts", "missing", "config"} <= set(summary) and summary["missing"] == []
    assert summary["seconds"]["wall"] > summary["seconds"]["phase1"] + summary["seconds"]["phase2"] > 0


def test_report_is_the_last_thing_on_the_screen(two_runs):
    out, text = two_runs[0][0], two_runs[1][0]
    summary = json.loads((out / "summary.json").read_text())
    lines = text.strip().splitlines()
    for model, line in (("global", lines[-3]), ("personal", lines[-2])):
        scores = summary[model]["test"]
        assert re.findall(r"F1 ([\d.]+)", line) == [f"{scores[k]:.4f}" for k in ("micro", "macro", "weighted")]
    for i, line in enumerate(lines[-5:-3]):
        h = summary["hosts"][i]
        assert line.split() == [str(i), f"{h['entropy']:.3f}", str(h["train_nodes"]), f"{h['seconds']:.1f}",
                                *(f"{h[m]['test']['micro']:.4f}" for m in ("global", "personal"))]
    assert len([line for line in lines if line.startswith("generalise")]) == 6
    assert len([line for line in lines if line.startswith("personalise")]) == 12


def test_two_runs_with_one_seed_are_equal_and_leave_nothing(two_runs):
    (a, b), _ = two_runs
    assert (a / "parts" / "part0" / "graph.dgl").read_bytes() == (b / "parts" / "part0" / "graph.dgl").read_bytes()
    for name in ("global.pt", "host0.pt", "host1.pt"):              # to the last bit, remote neighbours included
        first, second = (torch.load(out / name)["model"] for out in (a, b))
        assert all(torch.equal(first[k], second[k]) for k in first), name
    assert leftovers(a) == leftovers(b) == []


def test_a_second_run_into_the_same_directory(two_runs, data):
    out = two_runs[0][1]
    before = (out / "summary.json").read_text()
    job = launch("--dataset", data, "--out", out, *SMALL, "--sampler", "uniform", "--num_epochs", "4")
    _, error = job.communicate(timeout=240)
    assert job.returncode == 0, error
    summary = json.loads((out / "summary.json").read_text())
    assert summary["config"]["sampler"] == "uniform" and summary["config"]["epoch_fraction"] == 1
    assert before != (out / "summary.json").read_text()
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2 + 2 * 2


def children(job, count, log):
    """The job's processes by role, once all of them run and `log` exists."""
    while job.poll() is None:
        time.sleep(0.2)
        if len(found := psutil.Process(job.pid).children(recursive=True)) >= count and log.exists():
            return sorted(found, key=lambda p: p.pid)
    raise AssertionError(job.communicate())


@pytest.mark.parametrize("victim", ["server", "trainer", "launcher", "interrupt", "terminate"])
def test_a_failure_ends_the_job_everywhere_within_30_s(data, tmp_path, victim):
    out = tmp_path / "out"
    job = launch("--dataset", data, "--out", out, *SMALL, "--num_epochs", "100000", "--patience", "100000")
    found = children(job, 4, out / "global.pt")                     # in phase 1: server 0, host 0, server 1, host 1
    start = time.time()
    if victim in ("server", "trainer"):
        found[2 if victim == "server" else 3].kill()
    else:
        job.send_signal(dict(launcher=signal.SIGKILL, interrupt=signal.SIGINT, terminate=signal.SIGTERM)[victim])
    output, error = job.communicate(timeout=30)
    gone, alive = psutil.wait_procs(found, 5)
    assert not alive and time.time() - start < 30
    assert job.returncode == dict(server=1, trainer=1, launcher=-9, interrupt=130, terminate=143)[victim]
    if victim in ("server", "trainer"):
        assert re.search(f"train_dist-{dict(server='server', trainer='host')[victim]}1 failed .exit code -9.", error)
    if victim == "launcher":                                        # nobody is left to remove these
        for f in Path("/dev/shm").iterdir():
            if any(f".{line.split()[1]}." in f.name for line in (out / "ip_config.txt").read_text().splitlines()):
                f.unlink()
    assert leftovers(out) == []


def test_one_killed_in_personalisation_takes_nobody_along(data, tmp_path):
    out = tmp_path / "out"
    long = "--num_epochs 400 --sync_fraction 0.01 --patience 1000".split()
    job = launch("--dataset", data, "--out", out, *SMALL, *long)
    for line in job.stdout:
        if line.startswith("personalise host   1"):                 # it has left DistDGL
            break
    max(psutil.Process(job.pid).children(), key=lambda p: p.pid).kill()
    output, error = job.communicate(timeout=120)
    assert job.returncode == 3 and "PARTIAL: no result of host(s) 1" in output and "personalize-host1 failed" in error
    summary = json.loads((out / "summary.json").read_text())
    assert summary["missing"] == [1] and summary["hosts"][0]["seconds"] > 0 and leftovers(out) == []


@pytest.mark.parametrize("flags", ["--hosts 0", "--lr 0", "--nonsense 1", "--dataset no.npz", "--num_parts 2", "--hosts"])
def test_bad_input_is_one_line_and_writes_nothing(tmp_path, flags):
    job = launch("--out", tmp_path / "out", *flags.split())
    output, error = job.communicate(timeout=60)
    assert job.returncode == 2 and error.count("\n") == 1 and flags.split()[0] in error
    assert not (tmp_path / "out").exists()


def test_what_is_not_ours_is_left_alone(tmp_path, data):
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.txt").write_text("text")
    for dataset in ("no.npz", data):
        job = launch("--out", tmp_path, "--dataset", dataset, *SMALL)
        _, error = job.communicate(timeout=60)
        assert job.returncode == 2 and error.count("\n") == 1
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["logs", "logs/mine.txt"]


def test_as_many_edges_as_nodes_and_started_from_elsewhere_through_a_link(tmp_path):
    """DGL then takes a node tensor for an edge tensor. A module of the working folder must not be imported."""
    n = 100
    rng = np.random.default_rng(0)
    path = write_npz(tmp_path / "ring.npz", src=np.arange(50), dst=np.arange(50, 100), feat=rng.random((n, 3)),
                     label=np.arange(n) % 3, train_mask=np.arange(n) % 2 == 0, val_mask=np.arange(n) % 4 == 1,
                     test_mask=np.arange(n) % 4 == 3)
    (tmp_path / "random.py").write_text("raise SystemExit(9)")
    (tmp_path / "run").symlink_to(ROOT / "launch.sh")
    job = subprocess.run([tmp_path / "run", "--dataset", path, "--out", "o", *SMALL], cwd=tmp_path, capture_output=True, text=True)
    assert job.returncode == 0, job.stderr


@pytest.mark.slow
def test_the_main_job(tmp_path):
    """`./launch.sh` on the Debian graph with all its defaults."""
    start = time.time()
    job = launch("--out", tmp_path / "out")
    output, error = job.communicate(timeout=600)
    assert job.returncode == 0, error
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["personal"]["test"]["micro"] >= 0.76 and summary["personal"]["test"]["macro"] >= 0.55
    assert all(h["personal"]["val"]["micro"] >= h["global"]["val"]["micro"] for h in summary["hosts"])
    assert leftovers(tmp_path / "out") == []
