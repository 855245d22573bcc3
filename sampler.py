"""CBS: the class-balanced sampler (the paper's second technique). Needs neither DistDGL nor a process group.

Each mini-epoch a host draws a fraction of its training nodes without replacement, nodes of rare classes and nodes whose
neighbourhood carries more weight first:

    p(v) proportional to ||A^[:, v]||_2 / freq(y_v),   A^ = D^-1/2 A D^-1/2
"""
import numpy as np
import torch

# n training nodes of this host, N nodes, E edges, C classes


def generator(seed, host, epoch):
    """The random numbers of one mini-epoch; no two hosts, epochs or seeds share theirs."""
    return np.random.default_rng((seed, host, epoch))


def column_norms(src, dst, degree, num_nodes):
    """||A^[:, v]||_2 = sqrt(sum_u A_uv / (d_u d_v)) for the nodes v = 0..num_nodes-1, from all the edges u -> v into them.
    src, dst (E,), degree (N,) of every node named -> (num_nodes,); 0 for a node without edges."""
    # ASSUMED: in a directed graph d is the in-degree, and at least 1.
    degree = degree.double().clamp(min=1)
    total = torch.zeros(num_nodes, dtype=torch.double).index_add_(0, dst, 1 / degree[src])
    return (total / degree[:num_nodes]).sqrt()


def class_frequency(label):
    """freq(y_v): how many of the host's training nodes share v's class. Multi-label: the count of the rarest label of v;
    nodes without a label are a class of their own. label (n,) classes or (n, C) 0/1 -> (n,)"""
    if label.dim() == 1:
        return torch.bincount(label)[label] if len(label) else label
    label = label.bool()                                            # before ~, which on uint8 gives 254 and 255
    label = torch.cat([label, ~label.any(1, keepdim=True)], 1)      # (n, C + 1), the last column is "none"
    return label.sum(0).expand_as(label).masked_fill(~label, len(label) + 1).amin(1)


def cbs_probabilities(norm, label):
    """p(v) of the n training nodes. norm (n,) from column_norms, label (n,) or (n, C) -> (n,), positive, sums to 1"""
    # ASSUMED: a training node without neighbours (norm 0) gets the smallest norm of the others, so that it can be drawn.
    smallest = norm[norm > 0].min() if (norm > 0).any() else 1.0
    p = norm.clamp(min=smallest) / class_frequency(label)
    return p / p.sum()


def mini_epoch(nodes, p, size, rng):
    """`size` of the n training nodes in random order, none twice; p (n,) from cbs_probabilities, or None for uniform.
    Draws one after the other without replacement, as an exponential race: node v arrives at time Exp(1) / p(v), and the
    first `size` to arrive are taken. O(n)."""
    nodes = np.asarray(nodes)
    if p is None:
        return nodes[rng.permutation(len(nodes))[:size]]
    arrival = rng.standard_exponential(len(nodes)) / np.asarray(p)
    chosen = np.argpartition(arrival, size - 1)[:size] if size < len(nodes) else np.arange(len(nodes))
    return nodes[rng.permutation(chosen)]


def mini_epoch_sizes(num_train, fraction, batch_size):
    """How many nodes each host draws per mini-epoch, and in how many steps. All hosts take as many steps as the host with
    the most nodes needs for batches of at most batch_size; the others make smaller batches.
    num_train (P,) training nodes per host -> sizes (P,), steps"""
    sizes = np.ceil(np.asarray(num_train) * fraction).astype(int)
    return sizes, max(1, int(np.ceil(sizes.max() / batch_size)))


def batches(nodes, p, sizes, steps, host, rng):
    """One mini-epoch of the host whose number of nodes is sizes[host]: yields (seeds, share), `steps` times. share is the
    mean batch size over the hosts in this step: with the loss summed over the seeds / share, averaging the gradients over
    the hosts (DDP) gives the gradient of the mean loss over all their seeds."""
    seeds = np.array_split(mini_epoch(nodes, p, sizes[host], rng), steps)
    for step in range(steps):           # array_split makes the first size % steps batches one longer
        yield torch.as_tensor(seeds[step]), sum(s // steps + (step < s % steps) for s in sizes) / len(sizes)
