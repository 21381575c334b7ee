"""The modules after the BERT in a folder of sentence-transformers, as modules.json has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from mpimesh.errors import ModelError
from mpimesh.models.files import read_json, read_object

__all__ = ["Modules"]

_POOLING = {
    "cls": "pooling_mode_cls_token",
    "max": "pooling_mode_max_tokens",
    "mean": "pooling_mode_mean_tokens",
    "mean_sqrt_len_tokens": "pooling_mode_mean_sqrt_len_tokens",
}
# In the order in which sentence-transformers puts the vectors of several modes side by side.


@dataclass(frozen=True, slots=True)
class Modules:
    """The treatment of a sentence before and after the BERT.

    Attributes:
        folder: Where the files of the BERT are.
        pooling: How one vector is made of those of the tokens: "cls", "max", "mean" or
            "mean_sqrt_len_tokens"; of several the vectors stand side by side.
        normalize: Whether it is given the length 1.
        lower: Whether the sentences are turned to lower case first.
        max_tokens: Tokens of a sentence, with the two that frame it; None for as many as there are
            positions.
    """

    folder: Path
    pooling: tuple[str, ...]
    normalize: bool
    lower: bool
    max_tokens: object

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read it from the files in `folder`. Local.

        Without modules.json it is what sentence-transformers makes of such a folder: the mean of
        the tokens' vectors, of whatever length.

        Raises:
            ModelError: If a file cannot be read, or names a step that is not computed here.
        """
        path = folder / "modules.json"
        steps = _steps(path, read_json(path, needed=False, default=[]))
        kinds = [kind for kind, _ in steps]
        known = ["Transformer", "Pooling", "Normalize"]
        if steps and kinds not in (known, known[:2]):
            raise ModelError(
                f"{path} lists the modules {', '.join(kinds)}; computed here are Transformer, "
                "Pooling and then, or not, Normalize"
            )
        places = dict(steps)
        base = folder / places.get("Transformer", "")
        sentence = read_object(base / "sentence_bert_config.json", needed=False)
        prompt = read_object(folder / "config_sentence_transformers.json", needed=False).get(
            "default_prompt_name"
        )
        if prompt is not None:
            raise ModelError(
                f"the model in {folder} puts the prompt {prompt!r} before each sentence, which is "
                "not done here"
            )
        pooling = folder / places.get("Pooling", "1_Pooling") / "config.json"
        return cls(
            folder=base,
            pooling=_modes(pooling, read_object(pooling, needed="Pooling" in places)),
            normalize="Normalize" in places,
            lower=bool(sentence.get("do_lower_case", False)),
            max_tokens=sentence.get("max_seq_length"),
        )


def _steps(path: Path, found: object) -> list[tuple[str, str]]:
    """Return the kind of each module and its folder."""
    try:
        if not isinstance(found, Sequence):
            raise TypeError("no list")
        return [(str(one["type"]).rpartition(".")[2], str(one["path"])) for one in found]
    except (KeyError, TypeError) as error:
        raise ModelError(f"{path} must list modules, each with type and path: {error}") from None


def _modes(path: Path, config: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the modes that a pooling's config.json turns on."""
    if "pooling_mode" in config:  # as newer versions write it
        named = config["pooling_mode"]
        on = [named] if isinstance(named, str) else list(named)
    else:
        names = {key: name for name, key in _POOLING.items()}
        flags = {"pooling_mode_mean_tokens": True, **config}
        on = [
            names.get(key, key)
            for key, value in flags.items()
            if key.startswith("pooling_mode_") and value
        ]
    strange = [name for name in on if name not in _POOLING]
    if strange or not on:
        raise ModelError(
            f"{path} asks for the pooling {', '.join(map(str, strange)) or 'of nothing'}; computed "
            f"here are {', '.join(_POOLING)}"
        )
    return tuple(name for name in _POOLING if name in on)
