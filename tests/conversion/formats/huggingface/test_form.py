"""A Hugging Face repository written by all ranks is the one that the converter makes, byte for byte."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.conversion.formats.live_models import (
    CASES,
    bytes_of_folder,
    converted,
    form,
    model,
    ragged,
    settings,
)
from tests.support.distributed import RankError, run_ranks
from tests.support.faults.stream_storage import StreamStorage
from vescale_fsdp import RaggedDTensor, RaggedShard
from vescale_fsdp.checkpoint import CheckpointManager, EverySteps, PerRank, async_save, read_state, save
from vescale_fsdp.checkpoint.async_save import AsyncSaver
from vescale_fsdp.checkpoint.manifest.manifest import build_manifest
from vescale_fsdp.checkpoint.manifest.structure import Entry, Structure
from vescale_fsdp.checkpoint.ranks.coordinator import GroupCoordinator, SoloCoordinator
from vescale_fsdp.checkpoint.state.capture import take_state
from vescale_fsdp.checkpoint.storage.local import LocalStorage
from vescale_fsdp.checkpoint.storage.open import open_storage
from vescale_fsdp.conversion import HuggingFace, open_source
from vescale_fsdp.conversion.formats.huggingface import class_check, write_from_ranks
from vescale_fsdp.conversion.formats.huggingface.repository import BEING_WRITTEN
from vescale_fsdp.conversion.formats.huggingface.write_from_ranks import segments_of
from vescale_fsdp.conversion.live.held_shards import HeldShards
from vescale_fsdp.errors import CheckpointError, ConversionError
from vescale_fsdp.layout.distribution import Axis, RankSet, ShardCut

WORLD = 4


def _save_all(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, case in CASES.items():
        state: dict[str, Any] = {"model": model(case.kind, mesh)}
        state["optimizer"] = {"state": {"w": {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]}
        save(folder / name / "native", state)
        if name == "ragged":
            async_save(folder / name / "live", state, format=form(case, folder)).wait()
        else:
            save(folder / name / "live", state, format=form(case, folder))
        save(StreamStorage(folder / name / "streams"), state, format=form(case, folder))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every case, saved natively and as a repository by the same ranks."""
    folder = tmp_path_factory.mktemp("live")
    settings(folder)
    run_ranks(WORLD, _save_all, folder)
    return folder


@pytest.mark.filterwarnings("ignore:config.json ties")
@pytest.mark.part("formats")
@pytest.mark.parametrize("name", CASES)
def test_the_folder_is_what_the_converter_makes(name: str, saved: Path, tmp_path: Path) -> None:
    """Files, their cuts, index, headers, settings and every byte of every tensor: written in place, and as streams."""
    converted(CASES[name], saved, saved / name / "native", tmp_path / "hf")
    expected = bytes_of_folder(tmp_path / "hf")
    for way in ("live", "streams"):
        found = bytes_of_folder(saved / name / way)

        assert list(found) == list(expected)
        assert [file for file in expected if found[file] != expected[file]] == []
        assert sum(len(found[file]) for file in found if file.endswith(".safetensors")) > 500
    assert {path.name for path in (saved / name).iterdir()} == {"native", "live", "streams"}


def _refused(work: Callable[[], object], *texts: str) -> None:
    with pytest.raises((CheckpointError, ConversionError)) as caught:
        work()
    told = str(caught.value)
    assert [text for text in texts if text not in told] == [], told


def _misuse(folder: Path) -> None:
    rank, mesh = dist.get_rank(), init_device_mesh("cpu", (dist.get_world_size(),))
    state: dict[str, Any] = {"model": {"a": ragged(mesh, torch.arange(60.0).view(6, 10)), "b": torch.ones(3)}}
    assets, out = folder / "assets-False", folder / "out"
    plain = HuggingFace(assets=assets)

    def refused(state: Any, form: HuggingFace, *texts: str, **options: Any) -> None:
        before = bytes_of_folder(folder)
        dist.barrier()  # or this rank sees the temporary folder of one that is ahead of it
        _refused(lambda: save(out, state, format=form, **options), *texts)
        dist.barrier()
        assert bytes_of_folder(folder) == before
        dist.barrier()

    mine = HuggingFace(assets=assets, dtype="bfloat16" if rank else ())
    refused(state, mine, "disagree", "`format.dtype`", "bfloat16")
    refused(state, HuggingFace(assets=folder / "nowhere"), "no settings files", "nowhere")
    refused(state, HuggingFace(assets=assets / "tokenizer"), "config.json is missing")
    refused(state, HuggingFace(assets=assets, rules=str(folder / "none.toml")), "none.toml")
    more = {**state, "step": 3, "rng": PerRank(rank)}
    refused(more, plain, "cannot contain all", "step", "rng", "model_prefix")
    refused({"step": 3}, plain, "No model weights")
    misfits = {
        "model": {"0.qkv": torch.ones(31, 4), "0.experts": torch.ones(2, 4, 4), "padded": torch.ones(15, 2)}
    }
    ruled = HuggingFace(assets=assets, rules=str(folder / "rules.toml"))
    refused(misfits, ruled, "where: 0.qkv", "0.experts", "padded", "nothing matches pairs, wide")

    save(out, more, format=HuggingFace(assets=assets, model_prefix="model"))
    assert set(open_source(str(out)).tensors) == {"a", "b"}
    dist.barrier()
    refused(state, plain, "already holds", "config.json", "overwrite=True")
    save(out, {"model": {"c": torch.zeros(2)}}, format=plain, overwrite=True)
    assert set(open_source(str(out)).tensors) == {"c"}
    dist.barrier()
    if not rank:
        (out / "notes.txt").write_text("mine")
    dist.barrier()
    refused(state, plain, "already holds", "notes.txt", "move", overwrite=True)


def test_misuse_is_refused_by_name_on_all_ranks(tmp_path: Path) -> None:
    """What cannot be is refused on all ranks, by name, before anything is written; a folder is replaced on demand."""
    settings(tmp_path)
    run_ranks(2, _misuse, tmp_path)

    with pytest.raises(ConversionError, match="float16, bfloat16"):
        HuggingFace(assets=tmp_path, dtype="int3")
    with pytest.raises(ConversionError, match="budget_bytes"):
        HuggingFace(assets=tmp_path, budget_bytes=10)
    with pytest.raises(ValueError, match="HuggingFace"):
        save(tmp_path / "x", {}, format={"hf"})  # type: ignore[arg-type]
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="a file"):
        save(tmp_path / "file", {"a": torch.ones(1)}, format=HuggingFace(assets=tmp_path / "assets-False"))


def test_no_optimizer_is_staged(tmp_path: Path) -> None:
    """`async_save` copies no optimizer for a repository, and all of it where another form holds it too."""
    settings(tmp_path)
    weight, moments = torch.arange(4096.0), torch.ones(4096)
    state = {
        "model": {"w": weight},
        "optimizer": {"state": {"w": {"exp_avg": moments, "exp_avg_sq": moments + 1}}},
    }
    saver, repository = AsyncSaver(SoloCoordinator()), HuggingFace(assets=tmp_path / "assets-False")
    saver.start(tmp_path / "hf", state, format=repository).wait()

    assert saver._stager._buffer.numel() == weight.nbytes
    copies = [(open_storage(tmp_path / "native"), "native")]
    saver.start(tmp_path / "hf", state, format=repository, overwrite=True, copies=copies).wait()
    assert saver._stager._buffer.numel() == 3 * weight.nbytes
    assert torch.equal(read_state(tmp_path / "native")["optimizer/state/w/exp_avg_sq"].read(), moments + 1)
    (written,) = (tmp_path / "hf").glob("*.safetensors")
    assert torch.equal(load_file(written)["w"], weight)
    alone = take_state({"optimizer": state["optimizer"]}).structure  # a rank without a part of the model
    assert len(repository.dropped(alone)) == 2


class _Counts:
    """Bytes that come from other ranks, those of them that are written, and the calls that gather."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.received = self.written = self.peak = self.gathers = 0
        begin = self._counted(GroupCoordinator.begin_exchange)
        patch.setattr(GroupCoordinator, "begin_exchange", begin)
        for name in ("all_gather", "all_gather_object", "gather", "broadcast", "gather_object", "all_to_all"):
            patch.setattr(dist, name, self._gathering(getattr(dist, name)))

    def _counted(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def begin(coordinator: GroupCoordinator, outgoing: Any, incoming: Any) -> Any:
            self.received += sum(
                tensor.numel() - 1 for tensor, _ in incoming
            )  # one byte says that all is well
            self.peak = max(self.peak, self.received - self.written)
            return real(coordinator, outgoing, incoming)

        return begin

    def _gathering(self, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            self.gathers += 1
            return real(*args, **options)

        return call


def _little_is_held(folder: Path) -> None:
    budget, mesh = 48 << 10, init_device_mesh("cpu", (2,))
    full = torch.randn(700, 301)
    placement = RaggedShard.from_piece_numels((700, 301), [0, full.numel()])
    local = full.reshape(-1) if dist.get_rank() else torch.empty(0)
    far = RaggedDTensor.from_local(local, mesh, [placement], shape=(700, 301))
    one_writer = HuggingFace(assets=folder / "assets-False", budget_bytes=budget)
    with pytest.MonkeyPatch.context() as patch:
        counts = _Counts(patch)

        def wrote(offset: int, nbytes: int) -> None:
            counts.written += nbytes if offset else 0  # the header is this rank's own

        save(StreamStorage(folder / "far", wrote, pause_s=0.002), {"model": {"w": far}}, format=one_writer)
        if dist.get_rank() == 0:
            assert counts.received == full.nbytes > 10 * budget >= 10 * counts.peak > 0
        assert counts.gathers == 0
    with pytest.MonkeyPatch.context() as patch:
        counts = _Counts(patch)
        state = {"model": {"w": ragged(mesh, full), "v": ragged(mesh, full[0])}}
        save(folder / "near", state, format=HuggingFace(assets=folder / "assets-False", dtype="float16"))
        assert counts.received == counts.gathers == 0  # in place nothing travels at all


def test_no_rank_holds_more_than_its_budget(tmp_path: Path) -> None:
    """A tensor of many budgets, all of it another rank's, goes through a writer that holds one; nothing is gathered."""
    settings(tmp_path)
    run_ranks(2, _little_is_held, tmp_path)


class _Dying(LocalStorage):
    """Ends its process, or raises, when a data file is written to the second time."""

    error: BaseException | None = None

    def join(self, name: str) -> Any:
        if self.error is None:
            os.kill(os.getpid(), signal.SIGKILL)
        assert self.error is not None
        raise self.error

    def beside(self, name: str) -> LocalStorage:
        found = _Dying(super().beside(name).root)
        found.error = self.error
        return found


def _fail(folder: Path) -> None:
    rank, plain = dist.get_rank(), HuggingFace(assets=folder / "assets-False")
    mesh = init_device_mesh("cpu", (2,))
    save(folder / "out", {"a": ragged(mesh, torch.ones(50, 3))}, format=plain)
    before, names = bytes_of_folder(folder / "out"), sorted(path.name for path in folder.iterdir())
    dist.barrier()
    storage = _Dying(folder / "out") if rank else LocalStorage(folder / "out")
    if rank:
        storage.error = OSError("planted")  # type: ignore[attr-defined]
    with pytest.raises(OSError if rank else CheckpointError, match="planted"):
        save(storage, {"a": ragged(mesh, torch.zeros(50, 3))}, format=plain, overwrite=True)
    dist.barrier()
    assert bytes_of_folder(folder / "out") == before and names == sorted(
        path.name for path in folder.iterdir()
    )


def _raise(kind: type[BaseException], *args: object) -> None:
    raise kind("planted")


_PLACES = ("read_range", "JointFiles._numbers", "JointFiles._writer", "JointFiles._pack", "JointFiles._with")
_KINDS = (OSError, MemoryError, KeyboardInterrupt)


def _fail_between_ranks(folder: Path) -> list[tuple[str, str]]:
    """How saves of a tensor cut by columns end, whose segments mix ranks: for each place, kind of error and rank."""
    state = {"a": distribute_tensor(torch.rand(300, 40), init_device_mesh("cpu", (3,)), [Shard(1)])}
    plain, outcomes = HuggingFace(assets=folder / "assets-False", budget_bytes=48 << 10), []
    for place, kind, bad_rank in product(_PLACES, _KINDS, range(3)):
        with pytest.MonkeyPatch.context() as patch:
            if dist.get_rank() == bad_rank:
                patch.setattr(f"{write_from_ranks.__name__}.{place}", partial(_raise, kind))
            try:
                save(folder / "out", state, format=plain)
                outcomes.append(("saved", ""))
            except BaseException as error:  # noqa: BLE001  the test looks at whatever it is
                outcomes.append((type(error).__name__, str(error)))
    return outcomes


def test_ranks_that_share_segments_wait_for_none(tmp_path: Path) -> None:
    """Wherever a rank fails between messages, it raises what it met, and the others hear of it."""
    settings(tmp_path)
    ranks = run_ranks(3, _fail_between_ranks, tmp_path, timeout_s=120)
    for (_, kind, bad_rank), *outcomes in zip(product(_PLACES, _KINDS, range(3)), *ranks, strict=True):
        for rank, (name, text) in enumerate(outcomes):
            assert name == (kind.__name__ if rank == bad_rank else "CheckpointError")
            assert rank == bad_rank or f"rank {bad_rank}: {kind.__name__}" in text
    assert not (tmp_path / "out").exists()


def _die(folder: Path) -> None:
    storage = _Dying(folder / "out")
    mesh = init_device_mesh("cpu", (2,))
    form = HuggingFace(assets=folder / "assets-False")
    save(storage, {"a": ragged(mesh, torch.zeros(50, 3))}, format=form, overwrite=True)


def _save_again(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    form = HuggingFace(assets=folder / "assets-False")
    save(folder / "out", {"a": ragged(mesh, torch.zeros(50, 3))}, format=form, overwrite=True)


def test_the_old_folder_outlives_a_rank_that_fails_or_dies(tmp_path: Path) -> None:
    """After an error all ranks raise and nothing else is left; after a kill loaders refuse what is left beside."""
    settings(tmp_path)
    run_ranks(2, _fail, tmp_path)
    before = bytes_of_folder(tmp_path / "out")
    with pytest.raises(RankError):
        run_ranks(2, _die, tmp_path)

    assert bytes_of_folder(tmp_path / "out") == before
    assert not (tmp_path / ".out.saving" / "config.json").exists()
    with pytest.raises(ConversionError, check=lambda error: error.got == BEING_WRITTEN):
        open_source(str(tmp_path / ".out.saving"))
    run_ranks(2, _save_again, tmp_path)
    source = open_source(str(tmp_path / "out"))
    assert source.tensors["a"].info.shape == (50, 3) and bytes_of_folder(tmp_path / "out") != before
    assert not (tmp_path / ".out.saving").exists()


def _export(folder: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    form = HuggingFace(assets=folder / "assets-False", model_prefix="model")
    for asynchronous in (False, True):
        root = folder / f"run-{asynchronous}"
        manager = CheckpointManager(
            root,
            retention=1,
            save_policy=EverySteps(2),
            asynchronous=asynchronous,
            export=form,
            export_every=3,
        )
        for step in range(1, 7):
            state = {"model": {"a": ragged(mesh, torch.full((9, 5), float(step)))}, "step": step}
            manager.save(step, state)
        manager.wait()
        dist.barrier()
        assert manager.steps() == [6]
        assert sorted(os.listdir(root / "exports")) == ["step-00000003", "step-00000006"]
        for step in (3, 6):
            source = open_source(str(root / "exports" / f"step-{step:08d}"))
            file = (root / "exports" / f"step-{step:08d}" / "model.safetensors").read_bytes()
            assert set(source.tensors) == {"a"} and file.endswith(
                torch.full((45,), float(step)).numpy().tobytes()
            )
        restored = manager.restore({"model": {"a": ragged(mesh, torch.zeros(9, 5))}, "step": 0})
        assert restored is not None and restored.step == 6
        dist.barrier()


def test_a_manager_exports_steps(tmp_path: Path) -> None:
    """Every n steps a repository beside the run's own steps, which come and go without it; behind training too."""
    settings(tmp_path)
    run_ranks(2, _export, tmp_path)


class _Small(LocalStorage):
    """A disk with little room."""

    free_bytes = 2000

    def beside(self, name: str) -> LocalStorage:
        return _Small(self.root.with_name(name))


def test_room_for_what_is_written_is_enough(tmp_path: Path) -> None:
    """Its own bytes are asked for: a cast model without its optimizer, however large the state."""
    settings(tmp_path)
    state: dict[str, Any] = {"model": {"a": torch.ones(1000)}}
    state["optimizer"] = {"state": {"a": {"exp_avg": torch.ones(1000)}}, "param_groups": [{"lr": 0.1}]}
    form = HuggingFace(assets=tmp_path / "assets-False", dtype="bfloat16")
    save(_Small(tmp_path / "fits"), state, format=form)
    assert open_source(str(tmp_path / "fits")).nbytes == 2000
    for other in (HuggingFace(assets=tmp_path / "assets-False"), "dcp", "native", "zarr"):
        with pytest.raises(CheckpointError, check=lambda error: error.got == "2000"):
            save(_Small(tmp_path / "not"), state, format=other)
        assert bytes_of_folder(tmp_path / "not").keys() <= {".lock"}


def test_the_class_is_checked_by_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What does not fit is a warning, or an error where a check is required; the class itself is not asked."""
    sizes = {"vocab_size": 8, "hidden_size": 4, "intermediate_size": 6, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(tmp_path / "assets")
    monkeypatch.setattr(class_check, "ask_child", lambda *_: pytest.fail("a class was asked"))
    form = HuggingFace(assets=tmp_path / "assets", require_check=True)
    state = {"model": model.state_dict()}
    save(_Small(tmp_path / "fits"), state, format=form)
    assert transformers.LlamaForCausalLM.from_pretrained(tmp_path / "fits").config.hidden_size == 4

    lost = {"model": {name: value for name, value in state["model"].items() if name != "model.norm.weight"}}
    with pytest.raises(ConversionError) as caught:
        save(tmp_path / "not", lost, format=form)
    assert caught.value.got == "missing: model.norm.weight"
    with pytest.warns(UserWarning, match=r"\bmodel\.norm\.weight\b"):
        save(tmp_path / "warned", lost, format=HuggingFace(assets=tmp_path / "assets"))
    assert "model.norm.weight" not in load_file(tmp_path / "warned" / "model.safetensors")

    settings = json.loads((tmp_path / "assets" / "config.json").read_text()) | {"architectures": ["OfMine"]}
    (tmp_path / "assets" / "config.json").write_text(json.dumps(settings))
    with pytest.raises(ConversionError):
        save(tmp_path / "not", state, format=form)
    save(tmp_path / "unknown", state, format=HuggingFace(assets=tmp_path / "assets"))


def test_a_tie_that_the_bytes_deny_is_kept_as_two(tmp_path: Path) -> None:
    """Of tensors that config.json ties, one is left out only if all bytes are equal."""
    (tmp_path / "config.json").write_text('{"tie_word_embeddings": true}')
    state = {"model.embed_tokens.weight": torch.zeros(4, 3), "lm_head.weight": torch.zeros(4, 3)}
    save(tmp_path / "equal", {"model": state}, format=HuggingFace(assets=str(tmp_path)))
    assert load_file(tmp_path / "equal" / "model.safetensors").keys() == {"model.embed_tokens.weight"}
    state["lm_head.weight"][-1, -1] = 1
    with pytest.warns(UserWarning, match=r"lm_head\.weight"):
        save(tmp_path / "other", {"model": state}, format=HuggingFace(assets=str(tmp_path)))
    assert load_file(tmp_path / "other" / "model.safetensors").keys() == state.keys()


def test_a_rank_of_many_lists_its_own_turns(tmp_path: Path) -> None:
    """Of 1,024 ranks, each lists what it sends or writes; sender and writer list their common turns in one order."""
    settings(tmp_path)
    world, shape = 1024, (64, 2048)
    entries = tuple(Entry(f"model/w{i}", "float32", shape, 0, (ShardCut(1),)) for i in range(2))
    tree: Any = {"model": {f"w{i}": {"$": "tensor", "i": i} for i in range(2)}}
    structure = Structure(tree, entries, ((Axis(world, 1),),), ())
    manifest = build_manifest([(RankSet.world(world), structure)], save_id="0" * 16, world_size=world)

    def turns_of(rank: int) -> list[tuple[tuple[int, int, int], int, int, int]]:
        """(segment, sender, writer, bytes) of each turn with bytes."""
        shards = HeldShards(manifest, rank, {}, LocalStorage(tmp_path / "out"))
        plan, _ = HuggingFace(assets=tmp_path / "assets-False")._planned(shards, lambda one, other: False)
        segments = segments_of(plan, shards, world, shape[1] * 4 * 16, one_writer=False)  # 16 rows each
        turns = [turn for segment in segments for turn in segment.turns(rank) if turn.nbytes]
        assert all(rank in (turn.sender, *turn.receivers) for turn in turns)
        return [
            (
                (turn.job.file, turn.job.offset, turn.job.start),
                turn.sender,
                *turn.receivers,
                turn.nbytes,
            )
            for turn in turns
        ]

    writer, sender, last = map(turns_of, (0, 1, world - 1))
    assert len(last) == 2 * 4  # it sends its columns of four segments of each tensor
    assert {nbytes for *_, nbytes in last} == {2 * 16 * 4}
    assert len(writer) == 2 * (world - 1 + 3)  # it receives the first segment of each tensor, and sends three
    for one, other, ranks in ((writer, sender, {0, 1}), (writer, last, {0, world - 1})):
        common = [[turn for turn in turns if {turn[1], turn[2]} == ranks] for turns in (one, other)]
        assert common[0] == common[1] != []
