"""CBS against its formula on a dense matrix, and its draws against its probabilities."""
import numpy as np
import pytest
import torch

import sampler


def dense_norms(adjacency):
    """||(D^-1/2 A D^-1/2)[:, v]||_2 from the matrix itself."""
    d = adjacency.sum(0)
    scale = np.where(d > 0, 1 / np.sqrt(np.maximum(d, 1)), 0)
    return np.linalg.norm(scale[:, None] * adjacency * scale, axis=0)


def test_probabilities_by_formula():
    rng = np.random.default_rng(0)
    a = np.triu(rng.random((30, 30)) < 0.15, 1)
    a[:, 7] = a[7] = False                                          # an isolated node
    a = (a | a.T).astype(float)
    src, dst = (torch.tensor(i) for i in a.nonzero())
    degree = torch.tensor(a.sum(0)).long()
    norm = sampler.column_norms(src, dst, degree, 30)
    np.testing.assert_allclose(norm, dense_norms(a), rtol=1e-12)
    label = torch.tensor(rng.integers(0, 4, 30))
    expected = np.maximum(dense_norms(a), dense_norms(a)[dense_norms(a) > 0].min())
    expected = expected / np.bincount(label)[label]
    np.testing.assert_allclose(sampler.cbs_probabilities(norm, label), expected / expected.sum(), rtol=1e-12)


def test_norms_of_a_part_need_only_its_in_edges_and_the_degrees_of_its_halo():
    src, dst = torch.tensor([1, 2, 3, 0]), torch.tensor([0, 0, 1, 1])                      # nodes 2, 3: halo
    norm = sampler.column_norms(src, dst, torch.tensor([2, 2, 5, 1]), 2)
    torch.testing.assert_close(norm, torch.tensor([(1 / 4 + 1 / 10) ** 0.5, (1 / 2 + 1 / 4) ** 0.5]).double())


def test_multi_label_takes_the_rarest_label_and_none_is_a_class():
    label = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]])
    for dtype in (torch.int64, torch.uint8, torch.bool, torch.float32):
        assert sampler.class_frequency(label.to(dtype)).tolist() == [1, 3, 3, 2, 2]
    assert sampler.class_frequency(torch.tensor([4, 4, 0])).tolist() == [2, 2, 1]


@pytest.mark.parametrize("n, size", [(1, 1), (5, 5), (7, 3)])
def test_all_isolated_or_small_hosts_work(n, size):
    p = sampler.cbs_probabilities(torch.zeros(n), torch.zeros(n, dtype=torch.int64))
    torch.testing.assert_close(p, torch.full((n,), 1 / n))
    drawn = sampler.mini_epoch(torch.arange(n), p, size, sampler.generator(0, 0, 0))
    assert len(set(drawn.tolist())) == size


def chi_square(observed, expected):
    return ((observed - expected) ** 2 / expected).sum()


def test_frequencies_of_20000_draws():
    rng = np.random.default_rng(1)
    p = rng.random(12) + 0.05
    p /= p.sum()
    nodes, draws = np.arange(12), 20_000
    first = np.bincount([sampler.mini_epoch(nodes, p, 1, rng)[0] for _ in range(draws)], minlength=12)
    assert chi_square(first, draws * p) < 31.3                      # 99.9 % quantile, 11 degrees of freedom
    # without replacement: all ordered pairs, p_i p_j / (1 - p_i), whichever comes first
    pairs = np.zeros((12, 12))
    for _ in range(draws):
        i, j = sorted(sampler.mini_epoch(nodes, p, 2, rng))
        pairs[i, j] += 1
    ordered = p[:, None] * p / (1 - p[:, None])
    expected = draws * (ordered + ordered.T)
    upper = np.triu_indices(12, 1)
    assert chi_square(pairs[upper], expected[upper]) < 107.3        # 66 cells, 65 degrees of freedom
    # the order is random: the likeliest node is not first more often than last
    order = [sampler.mini_epoch(nodes, p, 2, rng) for _ in range(4000)]
    first_is_likelier = np.mean([p[a] > p[b] for a, b in order])
    assert abs(first_is_likelier - 0.5) < 0.03


@pytest.mark.parametrize("num_train, fraction, batch", [([100, 90], 1, 30), ([5, 5000], 1 / 3, 1000), ([0, 40], 1, 7),
                                                        ([4097, 4096, 4095, 1], 1, 1024)])
def test_batches(num_train, fraction, batch):
    """Equal step counts, no node twice in an epoch, none that is no training node, shares that sum to what was drawn."""
    sizes, steps = sampler.mini_epoch_sizes(num_train, fraction, batch)
    shares = []
    for host, n in enumerate(num_train):
        nodes = torch.arange(n) + 1000 * host
        drawn = list(sampler.batches(nodes, None, sizes, steps, host, sampler.generator(0, host, 1)))
        assert len(drawn) == steps
        seeds = [s for batch_seeds, _ in drawn for s in batch_seeds.tolist()]
        assert len(seeds) == len(set(seeds)) == int(np.ceil(n * fraction)) and set(seeds) <= set(nodes.tolist())
        assert max(len(s) for s, _ in drawn) <= batch
        shares.append([(len(s), share) for s, share in drawn])
    for step in zip(*shares):
        assert all(share == pytest.approx(sum(k for k, _ in step) / len(num_train)) for _, share in step)


def test_the_stream_is_that_of_seed_host_and_epoch():
    def draw(*key):
        return sampler.mini_epoch(np.arange(1000), None, 300, sampler.generator(*key)).tolist()

    np.random.seed(0)
    first = draw(0, 1, 2)
    np.random.seed(1)                                               # DistDGL resets the global generator
    torch.manual_seed(7)
    assert draw(0, 1, 2) == first
    others = [draw(1, 1, 2), draw(0, 2, 2), draw(0, 1, 3), draw(0, 2, 1), draw(2, 1, 0)]
    assert all(first != other for other in others)


def test_every_training_node_comes_up():
    p = sampler.cbs_probabilities(torch.rand(60, generator=torch.Generator().manual_seed(0)), torch.arange(60) % 7)
    seen = set()
    for epoch in range(60):
        seen |= set(sampler.mini_epoch(np.arange(60), p, 20, sampler.generator(0, 0, epoch)).tolist())
    assert seen == set(range(60))
