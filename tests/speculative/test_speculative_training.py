"""Training a draft: its batched view of a text is the engine's, it learns, and what it wrote serves."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from spec_kit import SETTINGS, VOCABULARY, draft_config, random_network, save_target
from typer.testing import CliRunner

from lowlat.cache.layout import KVPool
from lowlat.cli import main
from lowlat.engine.request import SamplingParams
from lowlat.layers.step import Segment, StepInputs
from lowlat.models.loading.checkpoint import open_checkpoint
from lowlat.offline import Engine
from lowlat.speculative import int8_linear
from lowlat.speculative.device_draft import SHARPNESS
from lowlat.speculative.dflash import BlockProposer, draft_layout
from lowlat.speculative.draft_files import load_draft
from lowlat.speculative.packed_network import PackedNetwork
from lowlat.speculative.proposer import DraftRequest
from lowlat.training.accepted import accepted
from lowlat.training.anchors import draw_anchors
from lowlat.training.draft_loss import blocks, loss_of
from lowlat.training.measuring import walked
from lowlat.training.muon import orthogonal
from lowlat.training.overlap import likeness, parts
from lowlat.training.target import Target
from lowlat.training.texts import Prompts, TextError, Texts, conversations
from lowlat.training.unfinished import UNFINISHED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("target"), initializer_range=0.1)


@pytest.fixture(scope="module")
def target(folder: Path) -> Target:
    return Target(open_checkpoint(str(folder)), torch.device("cpu"), torch.float32, 64)


def written_by(target: Target, temperature: float = 0.0, ends: frozenset[int] = frozenset()):
    prompts = [[(7 * n + 3 * k) % VOCABULARY for k in range(9)] for n in range(3)]
    return target.write(prompts, 12, temperature, (0, 2), ends, torch.Generator().manual_seed(1))


def test_the_target_writes_what_the_engine_answers(folder: Path, target: Target):
    written = written_by(target)
    with Engine(model=str(folder), **SETTINGS) as engine:
        found = engine.generate(
            written.tokens_ST[:, :9].tolist(), SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
        )
    assert [of.token_ids for of in found] == written.tokens_ST[:, 9:].tolist()
    assert written.features_STX.shape == (3, 20, 128)
    seen = []
    pool = KVPool(target.model.kv_layout(32, 1), torch.device("cpu"))
    from lowlat.models.decoder import Taps

    target.model.taps = Taps((0, 2), lambda features, step: seen.append(features))
    tokens = written.tokens_ST[1, :20]
    places = torch.arange(20)
    segment = Segment(0, 20, 20, places, 0)
    target.model.forward(StepInputs(tokens, places, places, 20, [segment], [], torch.tensor([19])), pool)
    target.model.taps = None
    torch.testing.assert_close(seen[0], written.features_STX[1], atol=1e-4, rtol=1e-4)


def test_what_lies_behind_the_end_is_not_learnt(target: Target):
    plain = written_by(target)
    end = int(plain.tokens_ST[0, 13])
    written = written_by(target, ends=frozenset([end]))
    first = int((plain.tokens_ST[0, 9:] == end).nonzero()[0]) + 9
    assert written.valid_ST[0].tolist() == [True] * (first + 1) + [False] * (20 - first)
    anchors = draw_anchors(written.valid_ST, written.prompt_S, written.begin_S, 200, torch.Generator().manual_seed(0))
    assert anchors.min() == 8
    assert anchors[0].max() == first - 1
    network = random_network(draft_config("dflash"), 2)
    found = blocks(network, target, written, torch.tensor([[first - 1]] * 3))
    assert found.known_QP[0].tolist() == [True, False, False, False]


@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "dspark of few tokens"])
def test_training_sees_what_serving_sees(target: Target, kind: str, window: int):
    """The first guess after each anchor, and its chance, are those of the proposer at that place."""
    few = {"draft_vocab_size": 60} if "few" in kind else {}
    kind = kind.split()[0]
    config = draft_config(kind, sliding_window=window, **few)
    network = random_network(config, seed=8)
    if few:
        some = torch.randperm(VOCABULARY, generator=torch.Generator().manual_seed(3))[:60]
        network.draft_tokens.copy_(some.sort().values)
    written = written_by(target)
    anchors = torch.tensor([[8, 11, 14], [9, 10, 15], [8, 12, 13]])
    found = blocks(network, target, written, anchors)
    assert loss_of(found, found.right()).isfinite()

    class Table:
        def segment(self, slot: int, rows: range, length: int) -> Segment:
            return Segment(0, 0, length, torch.arange(length), 0)

    for sequence in range(3):
        pool = KVPool(draft_layout(network, 24, 1), torch.device("cpu"))
        head = partial(target.head, tokens_V=network.vocabulary)
        proposer = BlockProposer(network, pool, Table(), target.embed, head)  # type: ignore[arg-type]
        places = torch.arange(20)
        step = StepInputs(places, places, places, 20, [], [], places)
        proposer.extend(written.features_STX[sequence], step)
        for column, anchor in enumerate(anchors[sequence].tolist()):
            block = 3 * sequence + column
            proposal = proposer.propose([DraftRequest(int(written.tokens_ST[sequence, anchor]), anchor, 0)])[0]
            best = int(found.scores_QPV[block, 0].argmax())
            assert proposal.tokens[0] == (best if network.vocabulary is None else int(network.vocabulary[best]))
            if kind == "dspark":
                assert found.confidence_QP is not None
                assert proposal.chances is not None
                expected = float(torch.sigmoid(found.confidence_QP[block, 0]))
                assert proposal.chances[0] == pytest.approx(expected, abs=1e-4)
            came = written.tokens_ST[sequence, anchor + 1 :].tolist()
            right = [guess == token for guess, token in zip(proposal.tokens, came, strict=False)]
            survived = [all(right[: place + 1]) for place in range(len(right))]
            assert found.right()[block].tolist() == survived


def test_steps_begin_behind_what_came():
    accepted = torch.tensor([[0, 2, 9, 9, 1, 9, 0], [6, 0, 0, 0, 0, 0, 0]])
    assert walked(accepted).nonzero().tolist() == [[0, 0], [0, 1], [0, 4], [0, 6], [1, 0]]


def sessions(folder: Path, count: int) -> None:
    folder.mkdir()
    for number in range(count):
        lines, said = [], ""
        for turn in range(3):
            said += f"user {number} says the words of turn {turn}, and some more words to fill the line. "
            lines.append(json.dumps({"input": said, "output": "ok. "}))
            said += "ok. "
        (folder / f"s{number}.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("path", [False, True])
@pytest.mark.parametrize("accepting", [0.0, 0.6, 1.0])
def test_the_slope_is_that_of_the_loss(target: Target, accepting: float, path: bool):
    """Against the loss written plainly, whose slope PyTorch finds."""
    network = random_network(draft_config("dspark"), seed=8)
    written = written_by(target, temperature=0.8)
    found = blocks(network, target, written, torch.tensor([[8, 11, 14], [9, 10, 15], [8, 12, 18]]))
    found = found._replace(temperature_Q=torch.tensor([0.0, 0.8, 1.2]).repeat(3), confidence_QP=None)
    scores = (3 * found.scores_QPV).detach().requires_grad_()
    target_QPV = (3 * found.target_QPV).requires_grad_(False)
    found = found._replace(scores_QPV=scores, target_QPV=target_QPV)
    assert not found.known_QP.all()
    got = loss_of(found, found.right(), accepting=accepting, path=path)
    (slope,) = torch.autograd.grad(got, scores)
    tau = found.temperature_Q.clamp(min=0.4)[:, None, None]
    weights = torch.exp(-torch.arange(scores.shape[1]) / 3) * found.known_QP
    cross = -((target_QPV / tau).softmax(-1) * (scores / tau).log_softmax(-1)).sum(-1) * tau[..., 0]
    its = (target_QPV / found.temperature_Q.clamp(min=0.1)[:, None, None]).softmax(-1)
    mine = (scores * SHARPNESS / tau).softmax(-1)

    def given(token):
        there = [of.gather(2, token[..., None]) for of in (its, mine)]
        return 1 / torch.maximum(its, mine * there[0] / there[1]).sum(-1)

    best = its.argmax(-1)
    match = its.amax(-1) * given(best) + (found.wanted_QP != best) * given(found.wanted_QP)
    before = given(found.wanted_QP) if path else match
    before = torch.cat([torch.ones_like(match[:, :1]), (before * found.known_QP)[:, :-1].cumprod(1)], 1)
    accepted = (before * match * found.known_QP).sum(1)
    loss = (1 - accepting) * (cross * weights).sum() / weights.sum() - accepting * accepted.log1p().mean()
    torch.testing.assert_close(got, loss)
    torch.testing.assert_close(slope, torch.autograd.grad(loss, scores)[0], atol=1e-5, rtol=1e-3)


@pytest.mark.parametrize("kind", ["dflash", "dflash2", "dspark", "dspark --derived 8 --vocabulary 80"])
def test_a_draft_learns_and_serves(folder: Path, tmp_path: Path, kind: str):
    """A few steps: the loss falls, acceptance is measured on text that was held out, and the engine accepts guesses."""
    data = tmp_path / "data"
    data.mkdir()
    generator = torch.Generator().manual_seed(0)
    for number in range(3):
        letters = torch.randint(33, 33 + 60, (400,), generator=generator).tolist()
        (data / f"{number}.txt").write_text("".join(map(chr, letters)))
    output = tmp_path / "draft"
    kind, *more = kind.split()
    flags = (
        " ".join(more)
        + " --steps 60 --sequences 8 --rounds 4 --anchors 6 --prompt-tokens 10 --answer-tokens 20 --block-size 4 "
    )
    flags += (
        "--layers 1 --taps 2 --intermediate-size 32 --rank 4 --learning-rate 0.01 --device cpu --int8 --temperature 0"
    )
    command = ["train-draft", "--model", str(folder), "--kind", kind, "--data", str(data), "--output", str(output)]
    result = CliRunner().invoke(main.app, [*command, *flags.split()])
    assert result.exit_code == 0, result.output
    assert "nothing was held out" in result.output
    assert "measures the draft" not in result.output
    losses = [float(line.split("loss ")[1].split()[0]) for line in result.output.splitlines() if "loss" in line]
    assert losses[-1] < losses[0] - 0.1, losses
    assert (output / "model.safetensors").stat().st_mode & 0o777 == 0o644
    again = flags.replace("--steps 60", "--steps 6 --cooling 0.5 --accepting 0.5").replace("--int8", "").split()
    result = CliRunner().invoke(main.app, [*command, *again, "--start", str(output)])
    assert result.exit_code == 0, result.output
    first = float(result.output.split("loss ")[1].split()[0])
    assert first < losses[0] - 0.1, "it goes on where the other ended"
    config, weights = load_draft(output)
    assert config.kind == kind
    assert config.target_layer_ids == (0, 1)
    assert all(weight.isfinite().all() for weight in weights.values())
    settings = SETTINGS | {"spec": kind, "draft": str(output), "spec_width": 4}
    with Engine(model=str(folder), **SETTINGS) as plain, Engine(model=str(folder), **settings) as engine:
        sampling = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
        prompts = [[1 + n, 2, 3, 4, 5 * n] for n in range(4)]
        expected = plain.generate(prompts, sampling)
        assert [of.token_ids for of in engine.generate(prompts, sampling)] == [of.token_ids for of in expected]
        report = engine.speculation()
        assert report is not None
        assert report.accepted > 0.04 * report.guessed > 0


def test_sessions_are_split_and_put_into_chats(tmp_path: Path):
    sessions(tmp_path / "a", 5)
    sessions(tmp_path / "b", 2)
    (tmp_path / "notes.txt").write_text("note")
    texts = Texts([tmp_path], hold_out=1)
    assert [path.parent.name + path.stem for path in texts.held_out] == ["as4", "bs1"]
    assert len(texts.training) == 6
    turns = conversations(texts.held_out[0])
    assert len(turns) == 3
    assert turns[2].startswith(turns[1] + "ok. ")
    checkpoint = open_checkpoint("smollm2")
    tokenizer = checkpoint.tokenizer()
    prompts = Prompts(texts.held_out, tokenizer, checkpoint.chat(tokenizer), 48, seed=1)
    for prompt in prompts.draw(48, 5):
        assert len(prompt) == 48
        text = tokenizer.decode(prompt)
        assert text.endswith("assistant\n")
        assert "fill the line" in text
    with pytest.raises(TextError, match="fewer --prompt-tokens"):
        Prompts(texts.held_out, tokenizer, checkpoint.chat(tokenizer), 500, seed=1)
    with pytest.raises(TextError, match="the chat template") as short:
        Prompts(texts.held_out, tokenizer, checkpoint.chat(tokenizer), 9, seed=1)
    least = int(re.search(r"--prompt-tokens (\d+) or more", str(short.value))[1])
    shortest = Prompts(texts.held_out, tokenizer, checkpoint.chat(tokenizer), least, seed=1)
    assert len(shortest.draw(least, 1)[0]) == least
    (tmp_path / "a" / "s0.jsonl").write_text('{"input": 3}')
    with pytest.raises(TextError, match=r"s0.jsonl:1: no turn"):
        conversations(tmp_path / "a" / "s0.jsonl")
    with pytest.raises(TextError, match="does not exist"):
        Texts([tmp_path / "nowhere"], 1)
    with pytest.raises(TextError, match=r"all 2 sessions are held out.* smaller --hold-out than 2$"):
        Texts([tmp_path / "b"], 2)


def test_the_command_says_what_is_wrong(folder: Path, tmp_path: Path):
    command = ["train-draft", "--model", str(folder), "--data", str(tmp_path), "--output", str(tmp_path / "x")]
    result = CliRunner().invoke(main.app, command)
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    assert "to train on" in result.stderr


@pytest.mark.parametrize("kept", [True, False])
def test_the_command_says_what_a_stopped_training_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: bool):
    def stopped(recipe, output: Path, *rest, **options):
        if kept:
            output.mkdir()
            (output / UNFINISHED).touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("lowlat.training.train_draft.train", stopped)
    command = ["train-draft", "--data", str(tmp_path), "--output", str(tmp_path / "x"), "--save-every", "7"]
    result = CliRunner().invoke(main.app, command)
    assert result.exit_code == 130
    if kept:
        assert f"--resume goes on from {tmp_path / 'x' / UNFINISHED}" in result.stderr
    else:
        assert "before anything was kept, which happens every 7 s (--save-every)" in result.stderr


def test_chance_that_both_draw_the_same_token():
    """Averaged over what the target draws, against draws with shared noise."""
    generator = torch.Generator().manual_seed(5)
    scores, target = torch.randn(2, 6, generator=generator).log_softmax(-1)
    noise = -torch.empty(200_000, 6).exponential_(generator=generator).log()
    drawn = (target + noise).argmax(-1)
    rows = [of.expand(len(drawn), -1) for of in (scores, target)]
    chance = likeness(*rows, drawn, torch.ones(len(drawn), 3))[:, 1].mean()
    assert float(chance) == pytest.approx(float(((scores + noise).argmax(-1) == drawn).float().mean()), abs=5e-3)


def test_accepted_tokens_are_those_of_the_engine_along_the_path_alone():
    """Three places, what comes after a token depends on it: against the engine's rule, with noise shared by both."""
    generator = torch.Generator().manual_seed(2)
    target = 2 * torch.randn(1 + 3 + 9, 3, generator=generator)
    scores = target + torch.randn(1 + 3 + 9, 3, generator=generator)
    best = int(target[0].argmax())
    # The draft is right after the likeliest first token, and wrong after the others.
    scores[[1 + token for token in range(3) if token != best]] *= -1
    draws = 100_000
    noise = -torch.empty(draws, 3, 3).exponential_(generator=generator).log()
    before, right, counted = torch.zeros(draws, dtype=torch.int64), torch.ones(draws, dtype=torch.bool), 0.0
    for place, first in enumerate((0, 1, 4)):
        drawn, guessed = ((of[first + before] + noise[:, place]).argmax(1) for of in (target, scores))
        right = right & (drawn == guessed)
        counted += float(right.float().mean())
        before = 3 * before + drawn
    paths = torch.cartesian_prod(*[torch.arange(3)] * 3)
    places = torch.stack([torch.zeros(27, dtype=torch.int64), 1 + paths[:, 0], 4 + 3 * paths[:, 0] + paths[:, 1]], 1)
    rows, ones = (scores[places].flatten(0, 1), target[places].flatten(0, 1)), torch.ones(81, 3)
    told = [of.view(27, 3) for of in parts(likeness(*rows, paths.flatten(), ones), rows[1], ones)]
    chances = target[places].softmax(-1).gather(2, paths[..., None])[..., 0].prod(1)
    assert float(chances.sum()) == pytest.approx(1)
    everywhere = torch.ones(27, 3, dtype=torch.bool)
    along, mixed = (
        float((accepted(*told, everywhere, everywhere & path)[0] * chances).sum()) for path in (True, False)
    )
    assert along == pytest.approx(counted, abs=5e-3)
    assert abs(mixed - counted) > 0.03, "what the likeliest token matches is counted before others' continuations too"


def test_updates_of_matrices_have_singular_values_near_one():
    for shape in ((3, 40, 24), (2, 24, 40)):
        matrices = torch.randn(*shape, generator=torch.Generator().manual_seed(5))
        values = torch.linalg.svdvals(orthogonal(matrices))
        assert 0.5 < float(values.min()) < float(values.max()) < 1.3
        # Of the same directions: U V^T of the decomposition.
        left, _, right = torch.linalg.svd(matrices, full_matrices=False)
        likeness = (orthogonal(matrices) * (left @ right)).sum((1, 2)) / min(shape[1:])
        assert float(likeness.min()) > 0.8


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_packed_network_is_the_network(kind: str):
    network = random_network(draft_config(kind), seed=3)
    generator = torch.Generator().manual_seed(1)
    features, places = torch.randn(5, 128, generator=generator), torch.tensor([3, 4, 5, 9, 70])
    rows, blocks_at = torch.randn(2, 5, 64, generator=generator), torch.arange(5) + torch.tensor([[10], [31]])
    lookers = []

    def attend(layer, q, k, v):
        lookers.append((layer, q.shape, k.shape, v.shape))
        return q + layer + (k + 2 * v).repeat_interleave(2, 2)

    products = [(network, lambda weight: partial(torch.nn.functional.linear, weight=weight))]
    if int8_linear.available():
        products.append((int8_linear.with_int8(network, least=1), int8_linear.int8_product))
    for plain, pack in products:
        packed = PackedNetwork(network, pack)
        for mine, theirs in zip(packed.context(features, places), plain.context(features, places), strict=True):
            torch.testing.assert_close(mine, theirs)
        lookers.clear()
        torch.testing.assert_close(packed.block(rows, blocks_at, attend), plain.block(rows, blocks_at, attend))
        assert lookers[:2] == lookers[2:]


def test_drafts_in_int8_guess_like_those_in_float32():
    if not int8_linear.available():
        pytest.skip("this PyTorch has no integer products here")
    network = random_network(draft_config("dspark"), seed=3)
    rounded = int8_linear.with_int8(network, least=1)
    assert rounded.fc is not network.fc
    assert isinstance(rounded.fc, torch.nn.Linear), "features of very different size"
    assert sum(isinstance(module, int8_linear.Int8Linear) for module in rounded.modules()) == 2 * 7 + 2
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1))
    for mine, theirs in ((rounded, network),):
        got, expected = mine.layers[0].up_proj(x), theirs.layers[0].up_proj(x)
        assert float((got - expected).norm() / expected.norm()) < 0.03
