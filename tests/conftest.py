"""Small graphs, and a real DistDGL job of several hosts on this machine, for all tests."""
import json
import multiprocessing
import multiprocessing.connection
import os
import random
import socket
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
os.environ["DGLBACKEND"] = "pytorch"

import dgl
import numpy as np
import pytest
import torch

import partition
import train_dist


def pytest_configure(config):
    config.addinivalue_line("markers", "slow: runs a whole job; leave out with -m 'not slow'")


def random_graph(n=150, classes=5, features=12, multilabel=False, seed=0):
    """The arrays of an .npz: clustered, with isolated nodes, an island, a self-loop, a parallel edge, zero and opposite
    features, and nodes in no split."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, classes, n)
    src, dst = rng.integers(0, n - 5, (2, 5 * n))                                          # the last 5 nodes are left over
    keep = (label[src] == label[dst]) | (rng.random(len(src)) < 0.2)
    src, dst = np.append(src[keep], [3, src[keep][0], n - 2]), np.append(dst[keep], [3, dst[keep][0], n - 1])
    feat = rng.normal(size=(n, features)) + 2 * np.eye(classes, features)[label]
    feat[:4], feat[5] = 0, -feat[6]
    split = rng.permutation(n) % 8                                                         # 0-3 train, 4-5 val, 6 test, 7 none
    if multilabel:
        label = (rng.random((n, classes)) < 0.3).astype(np.uint8)
    return dict(src=src, dst=dst, feat=feat.astype(np.float32), label=label, train_mask=split < 4,
                val_mask=(split == 4) | (split == 5), test_mask=split == 6)


def write_npz(path, **arrays):
    np.savez(path, **arrays)
    return path


def write_bin(path, src, dst, **data):
    """The same graph as DGL's .bin, directed and with its parallel edges"""
    g = dgl.graph((src, dst), num_nodes=len(data["label"]))
    g.ndata.update({k: torch.tensor(v) for k, v in data.items()})
    dgl.save_graphs(str(path), [g])
    return path


def read_graph(dataset, *flags):
    """The graph as partition.py sees it"""
    return partition.load(partition.check(partition.arguments().parse_args(["--dataset", str(dataset), *flags])))[0]


def make_parts(dataset, output, *flags):
    """partition.py in this process -> the path of the partition directory's .json"""
    partition.main(partition.check(partition.arguments().parse_args(
        ["--dataset", str(dataset), "--output", str(output), *map(str, flags)])))
    return output / f"{Path(dataset).stem}.json"


def full_graph_logits(model, g):
    """The obvious evaluation: the whole model on the whole graph in one process."""
    model.eval()
    block = dgl.to_block(g, g.nodes(), include_dst_in_src=True)
    assert torch.equal(block.srcdata[dgl.NID], g.nodes())
    with torch.no_grad():
        return model([block] * len(model.layers), g.ndata["feat"])


FORK = multiprocessing.get_context("forkserver")
FORK.set_forkserver_preload(["personalize", "torch._dynamo"])


def role(host, port, env, main, args, result):
    torch.set_num_threads(1)
    os.environ.update(env)
    train_dist.share_machine(host, port)
    with open(f"{result}.log", "w") as log:
        os.dup2(log.fileno(), 2)
    train_dist.guarded(lambda: torch.save(main(args), result))
    os._exit(0)


def free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        while True:
            try:
                s.bind(("", random.randrange(10000, 32000)))
                break
            except OSError:
                pass
    ports = [s.getsockname()[1] for s in sockets]
    [s.close() for s in sockets]
    return ports


def run_hosts(tmp_path, part_config, main, *flags, timeout=120):
    """main(args) on every host of a real DistDGL job -> what each host returned, by host"""
    hosts = json.loads(part_config.read_text())["num_parts"]
    meet, *ports = free_ports(hosts + 1)
    ip_config = tmp_path / "ip_config.txt"
    ip_config.write_text("".join(f"127.0.0.1 {port}\n" for port in ports))
    args = train_dist.check(train_dist.arguments().parse_args(
        ["--ip_config", str(ip_config), "--part_config", str(part_config), "--out", str(tmp_path), *map(str, flags)]))
    env = dict(DGL_DIST_MODE="distributed", DGL_IP_CONFIG=str(ip_config), DGL_CONF_PATH=str(part_config), DGL_NUM_SERVER="1",
               DGL_NUM_CLIENT=str(hosts), DGL_GRAPH_FORMAT="csc", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(meet),
               WORLD_SIZE=str(hosts), GLOO_SOCKET_IFNAME="lo")
    processes = []
    for i, port in enumerate(ports):
        for kind, more in (("server", dict(DGL_SERVER_ID=str(i))), ("client", dict(RANK=str(i)))):
            processes.append(FORK.Process(target=role, args=(
                i, port, {**env, **more, "DGL_ROLE": kind}, main, args, str(tmp_path / f"{kind}{i}"))))
            processes[-1].start()
    try:
        deadline = time.time() + timeout
        while any(p.exitcode is None for p in processes):
            multiprocessing.connection.wait([p.sentinel for p in processes if p.exitcode is None], 5)
            assert all(p.exitcode in (None, 0) for p in processes) and time.time() < deadline, \
                "\n".join(f"{f.name}\n{f.read_text()}" for f in sorted(tmp_path.glob("*.log")))
    finally:
        for p in processes:
            p.kill()
        for port in ports:
            for left in Path("/dev/shm").glob(f"*.{port}.*"):
                left.unlink()
    return [torch.load(tmp_path / f"client{i}") for i in range(hosts)]
