"""A method of your own in one file: FedProx keeps every site's model near the shared one.

T. Li et al.: Federated Optimization in Heterogeneous Networks. MLSys 2020.

    python examples/fedprox.py
    fedshift train --method examples.fedprox:FedProx --dataset digits --target photo --set fedprox.mu=0.1
"""

from dataclasses import dataclass

from fedshift import extend as fs


@dataclass(frozen=True)
class Hyper:
    mu: float = 0.01  # weight of the proximal term


@dataclass(frozen=True)
class Trained(fs.Release):
    model: fs.Weights
    samples: fs.Count
    loss: fs.Metric
    summed = frozenset({"model"})


@fs.step
def train_near(site: fs.Labelled, model: fs.Weights, rng: fs.Rng) -> Trained:
    """At the site: minimise h(w) = F_k(w) + mu/2 ||w - w_t||^2, Eq. (2)."""
    training, mu = site.plan.training, site.hyper(Hyper).mu
    net = fs.with_weights(fs.plain_network(site.plan), model, site.device).train()
    start = [parameter.detach().clone() for parameter in net.parameters()]

    def loss_of(batch):
        distance = sum(((now - then) ** 2).sum() for now, then in zip(net.parameters(), start, strict=True))
        return fs.label_loss(net(batch.x), batch.y) + mu / 2 * distance

    batches = site.train.batches(training.batch_size, rng, training.local_epochs, fs.augmentation(site.plan))
    loss = fs.train_batches(batches, loss_of, fs.sgd(site, net), training.precision)
    return Trained(fs.weights_of(net), len(site.train), loss)


@fs.register_method(fs.About("fedprox", ("generalize", "adapt", "multi-adapt"), "Li et al., MLSys 2020"))
class FedProx:
    hyper_type = Hyper
    steps = (train_near,)

    def round(self, state, fed):
        """At the coordinator: the mean over sites is the new model, as in FedAvg."""
        replies = fed.ask(fed.labelled, train_near, model=state.model)
        models = [(trained.model, trained.samples) for _, trained in replies]
        return type(state)(fed.average(models, since=state.model, sites=replies.answered))


if __name__ == "__main__":
    import fedshift

    keys = {"rounds": 8, "train_per_site": 300, "image_size": 16, "batch_size": 16, "lr": 0.05}
    print(fedshift.fit(FedProx, dataset="digits", target="handwritten", **keys).table())
