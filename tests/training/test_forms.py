"""Every form of a model and every shape of a batch gives one loss, or an error that says what is expected."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from distributed_training.runtime.errors import ModelError
from distributed_training.training.forms import Answer, Forms, is_classification


class Returns(nn.Module):
    """Gives back what a function makes of its input."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


def ask(net: nn.Module, data: Any, criterion: Any = None, loss: str = "auto", **options: Any) -> Answer:
    return Forms(net, criterion, loss)(net, data, **options)


X, Y = torch.randn(4, 3), torch.tensor([0, 1, 2, 1])


def test_logits_and_integer_targets_are_cross_entropy() -> None:
    answer = ask(nn.Identity(), (X, Y))
    assert torch.equal(answer.loss, F.cross_entropy(X, Y))  # type: ignore[arg-type]
    assert answer.output is X
    assert answer.targets is Y


def test_a_list_is_as_good_as_a_tuple() -> None:
    assert torch.equal(ask(nn.Identity(), [X, Y]).loss, F.cross_entropy(X, Y))  # type: ignore[arg-type]


def test_real_targets_are_squared_error() -> None:
    target = torch.randn(4, 3)
    assert torch.equal(ask(nn.Identity(), (X, target)).loss, F.mse_loss(X, target))  # type: ignore[arg-type]


@pytest.mark.parametrize("loss", ["auto", "mse", "l1", "bce"])
def test_one_column_against_a_vector_is_compared_row_by_row(loss: str) -> None:
    output, target = torch.randn(5, 1), torch.rand(5)
    expected = {"l1": F.l1_loss, "bce": F.binary_cross_entropy_with_logits}.get(loss, F.mse_loss)(output[:, 0], target)
    torch.testing.assert_close(ask(nn.Identity(), (output, target), loss=loss).loss, expected)


@pytest.mark.parametrize(("name", "function"), [("l1", F.l1_loss), ("mse", F.mse_loss)])
def test_the_setting_chooses_the_criterion(name: str, function: Any) -> None:
    target = torch.randn(4, 3)
    assert torch.equal(ask(nn.Identity(), (X, target), loss=name).loss, function(X, target))  # type: ignore[arg-type]


def test_the_users_criterion_wins_over_the_setting() -> None:
    answer = ask(nn.Identity(), (X, Y), criterion=lambda output, targets: output.sum() * 0 + 7, loss="mse")
    assert float(answer.loss) == 7  # type: ignore[arg-type]


def test_a_criterion_that_is_a_module_works() -> None:
    answer = ask(nn.Identity(), (X, Y), criterion=nn.CrossEntropyLoss(label_smoothing=0.1))
    assert torch.equal(answer.loss, F.cross_entropy(X, Y, label_smoothing=0.1))  # type: ignore[arg-type]


def test_language_models_are_judged_at_every_position() -> None:
    logits, labels = torch.randn(2, 5, 7), torch.randint(7, (2, 5))
    labels[0, 0] = -100
    loss = ask(nn.Identity(), (logits, labels)).loss
    torch.testing.assert_close(loss, F.cross_entropy(logits.reshape(10, 7), labels.reshape(10)))


def test_segmentation_with_classes_second_is_kept() -> None:
    """(batch, classes, height, width) against (batch, height, width) is what torch itself expects."""
    logits, labels = torch.randn(2, 3, 4, 4), torch.randint(3, (2, 4, 4))
    torch.testing.assert_close(ask(nn.Identity(), (logits, labels)).loss, F.cross_entropy(logits, labels))


@pytest.mark.parametrize("key", ["logits", "predictions", "reconstruction", "output"])
def test_a_dict_with_a_loss(key: str) -> None:
    answer = ask(Returns(lambda x: {"loss": x.mean(), key: x}), (X, Y))
    assert torch.equal(answer.loss, X.mean())  # type: ignore[arg-type]
    assert answer.output is X


def test_a_dict_with_only_a_loss() -> None:
    answer = ask(Returns(lambda x: {"loss": x.mean()}), X)
    assert torch.equal(answer.loss, X.mean())  # type: ignore[arg-type]
    assert set(answer.output) == {"loss"}


def test_an_object_with_a_loss_like_hugging_faces() -> None:
    answer = ask(Returns(lambda x: SimpleNamespace(loss=x.mean(), logits=x)), (X,))
    assert torch.equal(answer.loss, X.mean())  # type: ignore[arg-type]
    assert answer.output is X


@pytest.mark.parametrize("wrap", [lambda x: {"logits": x}, lambda x: SimpleNamespace(loss=None, logits=x)])
def test_logits_without_a_loss_are_given_to_the_criterion(wrap: Any) -> None:
    answer = ask(Returns(wrap), (X, Y))
    assert torch.equal(answer.loss, F.cross_entropy(X, Y))  # type: ignore[arg-type]


class Named(nn.Module):
    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        self.got = {"labels": labels is not None}
        return {"loss": input_ids.mean(), "logits": input_ids} if labels is not None else input_ids


def test_a_dict_batch_gives_only_what_forward_accepts() -> None:
    net = Named()
    answer = ask(net, {"input_ids": X, "labels": Y, "row_number": Y, "text": ["a"]})
    assert net.got == {"labels": True}
    assert torch.equal(answer.loss, X.mean())  # type: ignore[arg-type]
    assert answer.targets is Y


def test_a_forward_that_takes_anything_gets_everything() -> None:
    class Anything(nn.Module):
        def forward(self, **inputs: Any) -> Any:
            self.got = set(inputs)
            return {"loss": inputs["x"].sum()}

    net = Anything()
    ask(net, {"x": X, "more": Y})
    assert net.got == {"x", "more"}


@pytest.mark.parametrize("key", ["labels", "label", "targets", "target"])
def test_targets_of_a_dict_batch_are_found_by_name(key: str) -> None:
    answer = ask(Returns(lambda x: x), {"x": X, key: Y})
    assert torch.equal(answer.loss, F.cross_entropy(X, Y))  # type: ignore[arg-type]


def test_none_of_the_forms_is_an_error_that_names_the_model_and_what_it_returned() -> None:
    with pytest.raises(ModelError, match=r"Returns returned a tuple; it must return a tensor .*'loss'.*\.loss"):
        ask(Returns(lambda x: (x, x)), (X, Y))
    with pytest.raises(ModelError, match=r"a dict without 'loss' \(keys hidden\)"):
        ask(Returns(lambda x: {"hidden": [x]}), (X, Y))
    with pytest.raises(ModelError, match="NoneType"):
        ask(Returns(lambda x: None), X)


def test_a_loss_per_sample_is_refused_with_its_shape() -> None:
    with pytest.raises(ModelError, match=r"Returns returned a loss of shape \(4, 3\); it must be one number"):
        ask(Returns(lambda x: {"loss": x}), X)


@pytest.mark.parametrize("data", [X, (X,), {"x": X}])
def test_outputs_without_targets_are_an_error_only_if_a_loss_is_needed(data: Any) -> None:
    with pytest.raises(ModelError, match="no targets to compare it with"):
        ask(Returns(lambda x: x), data)
    answer = ask(Returns(lambda x: x), data, need_loss=False)
    assert answer.loss is None
    assert answer.output is X


def test_anything_may_come_back_if_no_loss_is_needed() -> None:
    assert ask(Returns(lambda x: (x, 1)), X, need_loss=False).output == (X, 1)


def test_prediction_does_not_look_at_targets() -> None:
    """Test data often carries placeholders such as -1 where labels would be."""
    answer = ask(nn.Identity(), (X, torch.full((4,), -1)), need_loss=False)
    assert answer.output is X


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32])
def test_labels_of_any_integer_type_will_do(dtype: torch.dtype) -> None:
    torch.testing.assert_close(ask(nn.Identity(), (X, Y.to(dtype))).loss, F.cross_entropy(X, Y))


@pytest.mark.parametrize(
    ("output", "targets", "expected"),
    [
        (X, Y, True),
        (X, Y.int(), True),
        (X, X, False),
        (X, None, False),
        ({"a": X}, Y, False),
        (X[:, 0], Y, False),
        (torch.randn(2, 5, 7), torch.randint(7, (2, 5)), True),
    ],
)
def test_classification_is_scores_against_integers(output: Any, targets: Any, expected: bool) -> None:
    assert is_classification(Answer(None, output, targets)) is expected


def test_a_reconstruction_is_no_classification_whatever_labels_lie_beside_it() -> None:
    assert not is_classification(ask(Returns(lambda x: {"loss": x.mean(), "reconstruction": x}), (X, Y)))
    assert is_classification(ask(Returns(lambda x: {"loss": x.mean(), "logits": x}), (X, Y)))


@pytest.mark.parametrize("loss", ["mse", "l1", "bce"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64])
def test_targets_of_numpys_types_can_be_trained_on(loss: str, dtype: torch.dtype) -> None:
    net = nn.Linear(3, 1)
    answer = ask(net, (X, torch.tensor([0, 1, 1, 0], dtype=dtype)), loss=loss)
    assert answer.loss is not None
    answer.loss.backward()
    assert net.weight.grad is not None


def test_double_outputs_keep_double_targets() -> None:
    target = torch.randn(4, 3).double()
    assert ask(nn.Identity(), (X.double(), target)).loss.dtype == torch.float64  # type: ignore[union-attr]
