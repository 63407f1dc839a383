"""What a loss declares: its metrics' normalizers, in code and docs, and the combinations that it refuses."""

import re
from pathlib import Path

import pytest
import torch

from kit.errors import BadInput
from kit.train.losses import ClippedPolicyGradient, NegativeLogLikelihood

DOCS = (Path(__file__).resolve().parents[2] / "docs" / "losses.md").read_text()

REFUSED = [
    ({"level": "token"}, "level='token' is unknown: use one of tokens, sequences"),
    ({"ratio": "rows"}, "ratio='rows' is unknown: use one of tokens, sequences, none"),
    ({"importance": True}, "importance=True is unknown: use one of none, tokens, sequences"),
    ({"truncation": "TIS"}, "truncation='TIS' is unknown: use one of none, tis, icepop, seq-mask-tis"),
    ({"kl_kind": "k4"}, "kl_kind='k4' is unknown: use one of k1, k2, k3"),
    ({"clip_low": 0}, "clip_low=0 is not allowed: it must be a finite number above 0"),
    ({"clip_high": -0.2}, "clip_high=-0.2 is not allowed: it must be a finite number above 0"),
    ({"clip_high": float("inf")}, "clip_high=inf is not allowed"),
    ({"dual_clip": 1.0}, "dual_clip=1.0 is not allowed: it must be a finite number above 1"),
    ({"kl": -0.1}, "kl=-0.1 is not allowed: it must be a finite number, 0 or above"),
    ({"kl": float("nan")}, "kl=nan is not allowed"),
    ({"kl": 0.1, "kl_input_clamp": 0}, "kl_input_clamp=0 is not allowed: it must be a finite number above 0"),
    ({"kl": 0.1, "kl_output_clamp": -1}, "kl_output_clamp=-1 is not allowed"),
    ({"kl_input_clamp": 20}, "kl_input_clamp and kl_output_clamp need kl above 0"),
    ({"kl_output_clamp": 10}, "kl_input_clamp and kl_output_clamp need kl above 0"),
    ({"ratio": "sequences"}, "ratio='sequences' needs level='sequences'"),
    ({"cispo": True, "ratio": "sequences", "level": "sequences"}, "cispo=True needs ratio='tokens'"),
    ({"cispo": True, "dual_clip": 3}, "cispo=True and dual_clip exclude each other"),
    ({"on_policy": True, "cispo": True}, "on_policy=True and cispo=True exclude each other"),
    ({"on_policy": True, "dual_clip": 3}, "on_policy=True and dual_clip exclude each other"),
    ({"ratio": "none", "cispo": True}, "ratio='none' excludes cispo, on_policy and dual_clip"),
    ({"ratio": "none", "on_policy": True}, "ratio='none' excludes cispo, on_policy and dual_clip"),
    ({"ratio": "none", "dual_clip": 3}, "ratio='none' excludes cispo, on_policy and dual_clip"),
    ({"positive_nll": -0.1}, "positive_nll=-0.1 is not allowed: it must be a finite number, 0 or above"),
    ({"truncation": "tis", "band_high": 2}, "truncation='tis' needs importance='tokens' or 'sequences'"),
    (
        {"truncation": "seq-mask-tis", "importance": "sequences", "band_low": 0.9, "band_high": 1.1},
        "truncation='seq-mask-tis' needs importance='tokens'",
    ),
    ({"truncation": "tis", "importance": "tokens"}, "truncation='tis' needs band_high"),
    ({"truncation": "icepop", "importance": "tokens", "band_high": 2}, "truncation='icepop' needs band_low above 0"),
    (
        {"truncation": "seq-mask-tis", "importance": "tokens", "band_high": 2},
        "truncation='seq-mask-tis' needs band_low above 0",
    ),
    (
        {"truncation": "tis", "importance": "tokens", "band_low": 3, "band_high": 2},
        "band_low=3 is above band_high=2: the band is empty",
    ),
    ({"importance": "tokens", "band_high": 2}, "band_low and band_high need truncation='tis', 'icepop' or"),
    ({"importance": "tokens", "band_low": 0.5}, "band_low and band_high need truncation"),
    ({"truncation": "tis", "importance": "tokens", "band_low": -1, "band_high": 2}, "band_low=-1 is not allowed"),
]


@pytest.mark.parametrize(("settings", "sentence"), REFUSED, ids=[str(settings) for settings, _ in REFUSED])
def test_what_makes_no_sense_is_one_sentence(settings, sentence):
    with pytest.raises(BadInput) as caught:
        ClippedPolicyGradient(**settings)
    assert str(caught.value).startswith(sentence)
    assert "\n" not in str(caught.value)


def test_likelihood_knows_its_levels():
    with pytest.raises(BadInput, match="level='rows' is unknown: use one of tokens, sequences"):
        NegativeLogLikelihood(level="rows")


SETTINGS = (
    [
        ("ClippedPolicyGradient", ClippedPolicyGradient(level=level, importance=importance, **truncation))
        for level in ("tokens", "sequences")
        for importance in ("none", "tokens", "sequences")
        for truncation in (
            {},
            {"truncation": "tis", "band_high": 2},
            {"truncation": "icepop", "band_low": 0.5, "band_high": 2},
            {"truncation": "seq-mask-tis", "band_low": 0.5, "band_high": 2},
        )
        if not truncation
        or importance == "tokens"
        or (importance == "sequences" and truncation["truncation"] != "seq-mask-tis")
    ]
    + [("ClippedPolicyGradient", ClippedPolicyGradient(positive_nll=0.5))]
    + [("NegativeLogLikelihood", NegativeLogLikelihood(level=level)) for level in ("tokens", "sequences")]
)


def reported(kind, loss):
    """The docs' table of normalizers for a loss with these settings."""
    section = DOCS.split("## Normalizers")[1].split("\n## ")[0]
    table = {}
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `") and kind in cells[1]:
            word = {
                "the loss's level": loss.level,
                "tokens": "tokens",
                "none": None,
                "sequences if importance is by sequence, else tokens": "sequences"
                if getattr(loss, "importance", "") == "sequences"
                else "tokens",
                "sequences for seq-mask-tis, else tokens": "sequences"
                if getattr(loss, "truncation", "") == "seq-mask-tis"
                else "tokens",
            }[cells[2]]
            if "with `positive_nll`" in cells[1] and kind == "ClippedPolicyGradient" and not loss.positive_nll:
                continue
            table |= dict.fromkeys(re.findall("`([a-z_]+)`", cells[0]), word)
    return table


@pytest.mark.parametrize(
    ("kind", "loss"), SETTINGS, ids=[f"{index}-{kind}" for index, (kind, _) in enumerate(SETTINGS)]
)
def test_the_docs_tell_the_normalizers(kind, loss):
    assert reported(kind, loss) == loss.normalizers()


@pytest.mark.parametrize(
    "loss", [loss for _, loss in SETTINGS], ids=[f"{i}-{kind}" for i, (kind, _) in enumerate(SETTINGS)]
)
def test_every_metric_has_a_normalizer_and_every_normalizer_a_metric(loss):
    ones = torch.ones(2, 3)
    names = ["token_mask", "advantages", "prev_logprobs", "generation_logprobs", "reference_logprobs"]
    batch = {**dict.fromkeys(names, ones), "sample_mask": torch.ones(2)}
    _, seen = loss(-ones[:, 1:], batch, tokens=1.0, sequences=1.0)
    assert set(seen) == set(loss.normalizers())
    assert all(value.shape == () for value in seen.values())


def test_the_docs_tell_what_is_refused():
    section = DOCS.split("## Refused")[1].split("\n## ")[0]
    for settings, _ in REFUSED:
        assert any(f"`{name}" in section for name in settings), settings
