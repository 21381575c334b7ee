"""The steps of a pipeline: of training, of evaluation, and forward only."""

from __future__ import annotations

from collections.abc import Mapping

from mpimesh.nn import Loss
from mpimesh.parallel.arguments import Arguments, SupportsStep
from mpimesh.parallel.model import ParallelModel
from mpimesh.parallel.tree import Tree

__all__ = ["PipelineSteps"]


class PipelineSteps(ParallelModel):
    """A model of stages that takes steps."""

    def train_step(
        self,
        x: Tree | None,
        target: Tree | None,
        *,
        loss: Loss | None = None,
        inputs: Mapping[str, Tree] | None = None,
        denominator: float | None = None,
        optimizer: SupportsStep | None = None,
    ) -> float:
        """Compute loss and gradients of a batch. Collective.

        Afterwards the gradients are those of this step, or, after steps under
        :meth:`no_sync`, the sums with theirs. The optimizer's step is the caller's, unless
        `optimizer` is given: then it is done, too, which is the same bit for bit.

        Instead of an array, x, the target, an input, and what a stage makes, may be a tuple,
        or a dict with text keys, of arrays, nested: all with the same rows. Or the batch is given
        cut, as :class:`Microbatches` of any shapes, such as sequences of different lengths.

        Shapes:
            x: (rows, ...), the global batch. May be None on ranks without the first stage.
            target: (rows, ...). May be None on ranks without the last stage.
            inputs[name]: (rows, ...). May be left out on ranks without a stage that takes it.

        Args:
            x: The inputs. May have fewer rows than replicas times microbatches; Microbatches may
                be as many as replicas times `num_microbatches`.
            target: What the loss compares the outputs with.
            loss: Such as ``nn.cross_entropy``. It gets what the last stage made, and the target.
                May be None on ranks without the last stage.
            inputs: Inputs that enter at stages with those names, ``PipelineStage(i, inputs=...)``.
            denominator: What to divide the loss by instead of what this batch counts: give the
                rows of k batches together to accumulate over k steps.
            optimizer: That of this rank's parameters, of :mod:`mpimesh.optim`, or the model's
                :class:`ParallelOptimizer`; on every rank or on none. Its ``step()``
                is called once it is known that the step went well on every rank, and the
                gradients are summed: if a stage, the loss or a message failed anywhere, no
                parameter has changed. An error of ``step()`` itself is raised on its rank alone.

        Returns:
            The mean loss over the global batch, the same on every rank.

        Raises:
            StageError: On every rank, if a stage, the loss or a message failed on any: with its
                rank, stage, microbatch and traceback. A :class:`StageShapeError` if an array had
                a wrong shape. The parameters are as before, the gradients are 0, and the next
                step works.
            ShapeError: On every rank, if a batch or an input is missing, or has no rows, or their
                rows differ.
            ScheduleError: On every rank, if there are more Microbatches than that.
            UnknownNameError: On every rank, if no stage takes an input of that name.
            MismatchError: On every rank, if the ranks were given different options or batches:
                their rows, shapes and dtypes are always compared, values of host arrays with
                ``MPIMESH_CHECKS`` on.
            BudgetError: On every rank, if any received more than :meth:`DeviceMesh.budget` allows.
            ModuleError: On every rank, if there is no loss, or an optimizer is given under
                :meth:`no_sync`. What the optimizer's own ``step()`` raises is raised on that rank
                alone.

        Cost:
            Each microbatch's activations and gradients once between neighbouring stages, but no
            gradients of arrays that are not floating; one all-reduce of the gradients over the
            replicas, for parameters that several ranks of a pipeline hold over all who do; and
            two all-reduces over all ranks, of 112 bytes and 32 for each named input at most. With
            ``MPIMESH_CHECKS`` on, each rank also reads its batch as a whole.
        """
        return self._loss_of(
            Arguments(
                training=True,
                x=x,
                target=target,
                inputs=inputs,
                loss=loss,
                denominator=denominator,
                optimizer=optimizer,
            )
        )

    def evaluate(
        self,
        x: Tree | None,
        target: Tree | None,
        *,
        loss: Loss | None = None,
        inputs: Mapping[str, Tree] | None = None,
        denominator: float | None = None,
    ) -> float:
        """Compute the loss of a batch, and nothing else. Collective over the mesh.

        As :meth:`forward`, nothing is kept for a backward, and dropout is the identity; gradients
        that are being added up stay as they are. The loss is computed where the outputs are, which
        no rank sends to another: with a :class:`VocabParallelCrossEntropy` nor within a layer.

        Shapes:
            x: (rows, ...), the global batch. May be None on ranks without the first stage.
            target: (rows, ...). May be None on ranks without the last stage.
            inputs[name]: (rows, ...). May be left out on ranks without a stage that takes it.

        Args:
            x: The inputs; an array, a tuple, a dict or Microbatches, as in :meth:`train_step`.
            target: What the loss compares the outputs with.
            loss: As in :meth:`train_step`.
            inputs: Inputs that enter at stages with those names.
            denominator: What to divide the loss by instead of what this batch counts: the rows of
                k batches together to add up the losses of k calls.

        Returns:
            The mean loss over the global batch, the same on every rank.

        Raises:
            StageError: On every rank, as in :meth:`train_step`, and so do all errors.

        Cost:
            The activations once between neighbouring stages, and two all-reduces over all ranks of
            112 bytes and 32 for each named input at most. The loss's gradient is computed, too, for
            a loss has no other way to divide by a number; it is dropped at once.

        Example:
            >>> held_out = pipe.evaluate(x, target, loss=nn.cross_entropy)
        """
        return self._loss_of(
            Arguments(
                training=False,
                evaluating=True,
                x=x,
                target=target,
                inputs=inputs,
                loss=loss,
                denominator=denominator,
            )
        )

    def forward(
        self,
        x: Tree | None,
        *,
        inputs: Mapping[str, Tree] | None = None,
        everywhere: bool = False,
    ) -> Tree:
        """Compute the outputs of a batch, microbatches streaming through the stages.

        Collective over the mesh. Nothing is kept for a backward, and dropout is the identity.

        Shapes:
            x: (rows, ...), the global batch. May be None on ranks without the first stage.
            inputs[name]: (rows, ...). May be left out on ranks without a stage that takes it.
            result: (rows, ...), in the order of the rows.

        Args:
            x: The inputs; an array, a tuple, a dict or Microbatches, as in :meth:`train_step`.
            inputs: Inputs that enter at stages with those names.
            everywhere: Give the result to every rank, not only to those of the last stage.

        Returns:
            The outputs, built as the last stage makes them, on ranks of the last stage or
            everywhere; else None. For Microbatches those of each, as Microbatches.

        Raises:
            StageError: On every rank, as in :meth:`train_step`.

        Cost:
            The activations once between neighbouring stages, one all-gather over the replicas,
            and with `everywhere` one broadcast over the stages, for each array of the output.
        """
        return self._forward(x, inputs=inputs, everywhere=everywhere)

    def __call__(self, x: Tree | None) -> Tree:
        """Run :meth:`forward`."""
        return self.forward(x)
