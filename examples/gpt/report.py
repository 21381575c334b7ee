"""Output of rank 0 in the training of a GPT: stages, steps, pictures."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from typing import Any

from common.report import MeshReport, WorkProgress

import mpimesh as mm
from mpimesh.trace import Event


class Report(MeshReport):
    """Prints and draws on rank 0. Making it is collective.

    Args:
        mesh: The ranks.
        options: As `gpt.options` read them.

    Raises:
        ProgramError: On every rank, if a file cannot be written.
    """

    def __init__(self, mesh: mm.DeviceMesh, options: Namespace) -> None:
        self._options = options
        super().__init__(mesh, [options.json, options.plot, options.timeline])

    def show_model(self, pipe: mm.PipelineParallel) -> None:
        """Show who computes what, where, and how the model is cut."""
        self.show_mesh()
        for number in range(pipe.num_stages):
            stage = pipe.stage(number)
            names = [type(layer).__name__ for layer in stage.layers] if stage else []
            self.say(f"stage {number}: {', '.join(names)}")
        shard, replicas = self._options.shard, self.mesh.dim_size("dp")
        parts = ("", "the optimizer's state", "gradients and the optimizer's state")
        parts += ("parameters, gradients and the optimizer's state",)
        if shard and replicas > 1:
            self.say(f"--shard {shard}: {replicas} replicas have {parts[shard]} once among them")
        elif shard:
            self.say(
                f"--shard {shard}: nothing to divide, there is one replica: give --mesh dp=..."
            )

    def progress(self, done: int, told: int) -> StepProgress:
        """Return what shows the progress, to be used as a context manager.

        Args:
            done: Steps that were done before.
            told: Losses on the text held out that a run before has shown.
        """
        return StepProgress(self, self._options, done, told)

    def show_sample(self, text: str) -> None:
        """Show what the model writes: what a terminal would obey is shown by its name.

        The replacement character of bytes that are no text is its own name.
        """
        shown = "".join(
            one if one.isprintable() or one == "\n" else ascii(one)[1:-1] for one in text
        )
        self.say(f"the model writes:\n{shown}")

    # -- files -----------------------------------------------------------------------------------

    def draw_timeline(self, events: Sequence[Event], step: int) -> None:
        """Draw the events of a step."""
        title = f"Training step {step} on {self.mesh.dims_text}: {self._options.schedule}"
        self.draw_events(self._options.timeline, events, title)

    def write(self, results: dict[str, Any]) -> None:
        """Draw the losses, write settings and results, where the options say, and tell of it."""
        self.draw_losses(self._options.plot, results["losses"])
        self.write_json(self._options.json, results)
        self.show_written()


class StepProgress(WorkProgress):
    """Shows the loss of steps, and what they were done with."""

    def __init__(self, report: Report, options: Namespace, done: int, told: int) -> None:
        self._bytes_per_step = options.batch_size * options.context
        self._told = told  # losses on the text held out that were shown
        self._told_s = 0.0
        super().__init__(report.console, "step", options.steps, unit="bytes", done=done)

    def step(
        self,
        losses: Sequence[float],
        seconds: float,
        held_out: Mapping[int, float],
        lr: float,
        norm: float,
    ) -> None:
        """Tell the losses of all steps so far, what those of this run took, and the last one's."""
        # That on the text that is held out may be older than the last step, but is told once.
        new = [*held_out.items()][-1:] if len(held_out) > self._told else []
        shown = "".join(f"  held out {loss:.3f} ({at})" for at, loss in new)
        text = f"loss {losses[-1]:.3f}{shown}  norm {norm:.2f}  rate {lr:.5f}"
        step_s, self._told_s = seconds - self._told_s, seconds
        if self.tell(len(losses), self._bytes_per_step, step_s, text):
            self._told = len(held_out)
