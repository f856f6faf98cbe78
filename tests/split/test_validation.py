"""Validation over real connections gives the numbers of a local evaluation, whatever happens on the way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests.feed.proxy import CuttingProxy
from tests.split.conftest import wait_for
from tests.split.services import CLASSES, QUICK, WIDTH, Rows, Service, arrays, network, serving
from tests.training.examples import trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from distributed_training.data import ArrayDataset, Plan
from distributed_training.feed import FeedServer, Loader, LoaderSettings
from distributed_training.feed.client import Client
from distributed_training.runtime.errors import ConfigError, DataError, FeedError
from distributed_training.split.inference import run_inference
from distributed_training.split.samples import Samples
from distributed_training.split.service import serve_clients
from distributed_training.split.validation import run_validation


def local(data: Any, batch_size: int = 32) -> dict[str, float]:
    """What an evaluation in this process says."""
    return trainer(network()).evaluate(DataLoader(TensorDataset(*data), batch_size=batch_size))


def assert_as_local(result: dict[str, Any], data: tuple[Tensor, Tensor], batch_size: int = 32) -> None:
    """To the last bit."""
    expected = local(data, batch_size)
    assert (result["average_loss"], result["accuracy"]) == (expected["loss"], expected["accuracy"])
    assert result["total_samples"] == len(data[0])


@pytest.mark.parametrize("workers", [0, 2])
def test_numbers_are_those_of_a_local_evaluation(workers: int) -> None:
    data = arrays()
    with serving("validation") as service:
        dataset = ArrayDataset(data, num_classes=CLASSES) if workers == 0 else Rows(data)
        result = run_validation(dataset, service.link, batch_size=32, num_workers=workers, settings=QUICK)
        assert_as_local(result, data)
    with torch.no_grad():
        predicted = network().eval()(data[0]).argmax(1)
    matrix = torch.zeros(CLASSES, CLASSES, dtype=torch.int64)
    for target, said in zip(data[1], predicted):
        matrix[target, said] += 1
    assert torch.equal(torch.from_numpy(result["confusion_matrix"]), matrix)
    second = result["per_class"]["2"]
    assert second["samples"] == int((data[1] == 2).sum())
    assert second["correct"] == int(matrix[2, 2])
    assert second["precision"] == pytest.approx(int(matrix[2, 2]) / int(matrix[:, 2].sum()))
    assert result["bytes_sent"] > data[0].nbytes
    assert result["bytes_received"] < result["bytes_sent"]


class _ByName(nn.Module):
    """A model that takes its inputs by name and gives its own loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = network()

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        scores = self.net(x)
        return {"loss": 3 * nn.functional.cross_entropy(scores, labels), "logits": scores}


def test_a_model_with_its_own_loss_and_data_by_name() -> None:
    inputs, labels = arrays()
    data = ArrayDataset({"x": inputs, "labels": labels})
    expected = trainer(_ByName(), training__batch_size=32).evaluate(data)
    with serving("validation", trainer(_ByName())) as service:
        result = run_validation(data, service.link, batch_size=32, settings=QUICK)
    assert (result["average_loss"], result["accuracy"]) == (expected["loss"], expected["accuracy"])


def test_over_tls_and_with_a_token_only() -> None:
    data = arrays()
    with serving("validation", secure=True) as service:
        assert_as_local(run_validation(data, service.link, batch_size=32, settings=QUICK), data)
        host, _, rest = service.link.partition("@")
        with pytest.raises(FeedError, match="the token is not that of this run"):
            run_validation(data, f"{host[:-4]}AAAA@{rest}", settings=QUICK)


def test_a_regression_has_a_loss_and_no_accuracy() -> None:
    data = (arrays()[0], arrays()[0][:, :1] * 2)
    net = network(outputs=1)
    with serving("validation", trainer(net)) as service:
        result = run_validation(data, service.link, batch_size=50, settings=QUICK)
    with torch.no_grad():
        expected = nn.functional.mse_loss(net.eval()(data[0]), data[1])
    assert result["average_loss"] == pytest.approx(float(expected), rel=1e-6)
    assert (result["accuracy"], result["per_class"], result["confusion_matrix"]) == (None, None, None)


def test_clients_come_together_and_one_after_the_other() -> None:
    tasks = [(arrays(100 + 31 * number, seed=number), 8 * (number % 4 + 1)) for number in range(8)]

    def validate(task: tuple[tuple[Tensor, Tensor], int]) -> dict[str, Any]:
        return run_validation(task[0], service.link, batch_size=task[1], settings=QUICK)

    with serving("validation") as service, ThreadPoolExecutor(4) as clients:
        results = list(clients.map(validate, tasks))
        service.turns.stop()
        figures = service.turns.figures()
    for result, (data, size) in zip(results, tasks):  # here: the same network is made with torch's one generator
        assert_as_local(result, data, size)
    assert figures.samples == sum(100 + 31 * number for number in range(8))


def test_a_client_that_goes_away_or_fails_concerns_nobody_else() -> None:
    data = arrays(900)
    with serving("validation") as service:
        leaving = Client(service.link, "validation", {}, QUICK)
        answers = leaving.run(Samples(data, 4))
        assert len(next(answers)[0]) == 4
        with pytest.raises(FeedError, match=r"the model failed on a batch of 10 samples.*shapes"):
            run_validation((torch.randn(20, WIDTH + 1), arrays(20)[1]), service.link, batch_size=10, settings=QUICK)
        with pytest.raises(FeedError, match="no targets to compare it with"):
            run_validation(torch.randn(20, WIDTH), service.link, batch_size=10, settings=QUICK)
        answers.close()  # in the middle of its task
        half_said = socket.create_connection(("127.0.0.1", service.server.port))
        assert_as_local(run_validation(data, service.link, batch_size=32, settings=QUICK), data)
        half_said.close()
    assert service.turns.memory_held == 0


@pytest.mark.parametrize("seed", range(3))
def test_a_cut_connection_is_made_again_and_nothing_is_counted_twice(seed: int) -> None:
    data = arrays(2000, seed=seed)
    with serving("validation") as service, CuttingProxy(service.server.port, seed, 4, 60_000) as proxy:
        result = run_validation(data, f"127.0.0.1:{proxy.port}", batch_size=8, settings=QUICK)
        assert proxy.cut == 4
    assert_as_local(result, data, 8)


def _begun(service: Service, data: Any) -> tuple[threading.Event, Callable[[], dict[str, Any]], ThreadPoolExecutor]:
    begun, pool = threading.Event(), ThreadPoolExecutor(1)

    class Slow(Rows):
        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            if index == 40:
                begun.set()
                assert goes_on.wait(20)
            return super().__getitem__(index)

    goes_on = threading.Event()
    future = pool.submit(run_validation, Slow(data), service.link, batch_size=8, settings=QUICK)

    def end() -> dict[str, Any]:
        goes_on.set()
        return future.result(30)

    return begun, end, pool


def test_a_task_goes_on_when_the_server_comes_back_with_the_same_model_only() -> None:
    data = arrays()
    for seed in (0, 1):
        first = Service("validation", trainer(network()))
        begun, end, pool = _begun(first, data)
        with pool:
            assert begun.wait(20)
            wait_for(first.has_sent, lambda: "no results were sent")
            first.close(finished=False)
            with serving("validation", trainer(network(seed)), port=first.server.port):
                if seed == 0:
                    assert_as_local(end(), data, 8)
                else:
                    with pytest.raises(FeedError, match="has another model than before"):
                        end()


def test_each_server_takes_only_what_it_is_there_for(caplog: pytest.LogCaptureFixture) -> None:
    data = arrays(20)
    with serving("validation") as service:
        with pytest.raises(FeedError, match=r"is there for validation, not for inference; start one with mode='inf"):
            run_inference(data, service.link, settings=QUICK)
        dataset = ArrayDataset(data)
        with pytest.raises(FeedError, match=r"is there for validation, not for training"):
            Loader(dataset, Plan(20, 5, 0), service.link, settings=QUICK).run()
        assert "refused a connection from 127.0.0.1" in caplog.text
    with serving("inference") as service, pytest.raises(FeedError, match=r"for inference, not for validation"):
        run_validation(data, service.link, settings=QUICK)
    with FeedServer() as training:
        for run in (run_validation, run_inference):
            with pytest.raises(FeedError, match="for training only"):
                run(data, training.link(), settings=QUICK)
    with pytest.raises(ConfigError, match="mode='both' is none of training, validation, inference"):
        serve_clients(trainer(), "both", None)  # type: ignore[arg-type]


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_named_or_left_out(workers: int) -> None:
    data, bad = arrays(50), (3, 4, 5, 17)
    dataset = Rows(data, bad)
    with serving("validation") as service:
        run = {"batch_size": 3, "num_workers": workers, "settings": QUICK}  # 3, 4 and 5 are a batch of their own
        with pytest.raises(DataError, match=r"sample 3 cannot be loaded: .*the file of 3 is damaged.*on_bad_sample"):
            run_validation(dataset, service.link, **run)
        result = run_validation(dataset, service.link, on_bad_sample="skip", **run)
    assert sorted(result["skipped"]) == list(bad)
    rest = [n for n in range(50) if n not in bad]
    expected = trainer(network()).evaluate(DataLoader(TensorDataset(data[0][rest], data[1][rest]), batch_size=7))
    assert result["total_samples"] == 46
    assert result["accuracy"] == expected["accuracy"]
    assert result["average_loss"] == pytest.approx(expected["loss"], rel=1e-6)


def test_memory_stays_within_its_bound_and_a_batch_that_cannot_fit_is_refused() -> None:
    wide = ArrayDataset((torch.randn(512, 16 << 10), torch.zeros(512, dtype=torch.int64)))  # 32 MiB
    net, most = nn.Linear(16 << 10, 3), 0
    with serving("validation", trainer(net), memory=2 << 20) as service:

        def look(done: int, total: int) -> None:
            nonlocal most
            most = max(most, service.turns.memory_held)

        with ThreadPoolExecutor(2) as clients:
            run = {"batch_size": 4, "on_progress": look, "settings": QUICK}
            for result in clients.map(lambda _: run_validation(wide, service.link, **run), range(2)):
                assert result["total_samples"] == 512
        assert 0 < most <= 2 << 20
        with pytest.raises(FeedError, match=r"one batch takes 1\.0 MiB.*raise its memory to at least 4 MiB"):
            run_validation(wide, service.link, batch_size=16, settings=QUICK)


def test_what_can_only_be_iterated_is_refused_with_the_reason() -> None:
    with pytest.raises(DataError, match="__len__ and __getitem__"):
        Samples(iter([torch.zeros(3)]), 4)
    assert isinstance(Samples(DataLoader(TensorDataset(*arrays(10)), batch_size=4), 7), Samples)


def test_nobody_there_ends_with_a_clear_error() -> None:
    patience = LoaderSettings(patience=0.1, first_pause=0.05, longest_pause=0.05)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    with pytest.raises(FeedError, match=r"gave up after .* cannot be reached"):
        run_validation(arrays(4), f"127.0.0.1:{port}", settings=patience)


def test_compressed_batches_give_the_same_numbers() -> None:
    data = (torch.zeros(4096, WIDTH), torch.zeros(4096, dtype=torch.int64))
    with serving("validation") as service:
        settings = LoaderSettings(compression="always")
        result = run_validation(data, service.link, batch_size=2048, settings=settings)
    assert_as_local(result, data, 2048)
    assert result["bytes_sent"] < data[0].nbytes / 4
