"""Who keeps copies of whose part, and which files go where: arithmetic alone."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from vescale_fsdp.checkpoint.memory.partners import (
    node_name,
    partners_in_cliques,
    partners_in_rings,
    plan_moves,
)
from vescale_fsdp.checkpoint.memory.peer_memory import HeldPart, is_whole
from vescale_fsdp.checkpoint.ranks.exchange import FileMove, waves_of
from vescale_fsdp.errors import CheckpointError

NODES = st.lists(st.integers(1, 4), min_size=1, max_size=9)
"""Ranks of each node."""


def _by_rank(sizes: list[int]) -> list[str]:
    return [f"node {number}" for number, size in enumerate(sizes) for _ in range(size)]


@given(NODES, st.integers(1, 3))
def test_a_clique_survives_all_but_one_of_its_nodes(sizes: list[int], replicas: int) -> None:
    """Copies lie on other nodes, each on another one, and no rank of a node keeps all of them; too few nodes hold as
    many copies as there are other nodes."""
    nodes = _by_rank(sizes)
    partners = partners_in_cliques(nodes, replicas)
    replicas = min(replicas, len(sizes) - 1)

    for rank, keepers in enumerate(partners):
        assert len({nodes[rank], *(nodes[keeper] for keeper in keepers)}) == replicas + 1
    kept = Counter(keeper for keepers in partners for keeper in keepers)
    assert max(kept.values(), default=0) <= replicas * max(sizes)
    if len(set(sizes)) == 1:
        assert set(kept.values()) == ({replicas} if replicas else set())


def test_cliques_are_small() -> None:
    """Two lost nodes take a part with them only if they are of one clique."""
    assert partners_in_cliques(list("aabbccdd"), 1) == [[2], [3], [0], [1], [6], [7], [4], [5]]
    assert partners_in_cliques(list("abcde"), 1) == [[1], [0], [3], [4], [2]]  # what is left joins the last


def test_rings_lead_to_other_nodes() -> None:
    """A mesh that does not is refused."""
    rings = [[0, 2], [1, 3], [0, 2], [1, 3]]

    assert partners_in_rings(rings, list("aabb"), 1) == [[2], [3], [0], [1]]
    with pytest.raises(CheckpointError, check=lambda error: "[0, 2]" in f"{error.got} {error.where}"):
        partners_in_rings(rings, list("abab"), 1)
    assert partners_in_rings(rings, list("aabb"), 2) == [
        [2],
        [3],
        [0],
        [1],
    ]  # as many as there are other nodes
    assert partners_in_rings(rings, list("aaaa"), 1) == [[], [], [], []]
    with pytest.raises(CheckpointError, match="replicas=2"):
        partners_in_rings(rings, list("aabc"), 2)


def test_nodes_are_told_apart_by_their_folders(tmp_path: Path) -> None:
    """Two folders in memory are two nodes, one under two names is one."""
    (tmp_path / "link").symlink_to(tmp_path / "a", target_is_directory=True)

    assert node_name(tmp_path / "a") == node_name(tmp_path / "link") != node_name(tmp_path / "b")


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=30))
def test_waves_keep_ranks_to_one_file_each_way(pairs: list[tuple[int, int]]) -> None:
    """And as many waves are enough as the busiest rank has files, but for what greed costs."""
    moves = [FileMove(f"{number}", *pair) for number, pair in enumerate(pairs)]

    waves = waves_of(moves)

    assert sorted(move for wave in waves for move in wave) == sorted(moves) and all(waves)
    for wave in waves:
        assert len({move.sender for move in wave}) == len({move.receiver for move in wave}) == len(wave)
    busiest = max(Counter(sender for sender, _ in pairs).values(), default=0)
    busiest = max(busiest, *Counter(receiver for _, receiver in pairs).values(), 0)
    assert busiest <= len(waves) <= max(0, 2 * busiest - 1)


@given(NODES, st.data())
def test_moves_bring_each_file_once(sizes: list[int], data: st.DataObject) -> None:
    """To every node that wants it and lacks it, from a rank whose node has it, evenly."""
    nodes = _by_rank(sizes)
    names = [f"file {number}" for number in range(6)]
    some = st.sets(st.sampled_from(names))
    held_by_node = [data.draw(some) for _ in sizes]
    held_by_node[data.draw(st.integers(0, len(sizes) - 1))].update(names)
    held = [held_by_node[number] for number, size in enumerate(sizes) for _ in range(size)]
    wanted = [data.draw(some) for _ in nodes]

    moves = plan_moves(wanted, held, nodes)

    for move in moves:
        assert move.name in held[move.sender] and move.name not in held[move.receiver]
    arrived = Counter((nodes[move.receiver], move.name) for move in moves)
    lacking = {(nodes[rank], name) for rank, names in enumerate(wanted) for name in names - held[rank]}
    assert arrived == Counter(lacking)


def test_the_load_is_shared() -> None:
    """Ranks of one node send and receive in turn."""
    wanted = [{"a", "b", "c", "d"}, set(), set(), set()]
    held = [set(), set(), {"a", "b", "c", "d"}, {"a", "b", "c", "d"}]

    moves = plan_moves(wanted, held, list("xxyy"))

    assert Counter(move.sender for move in moves) == Counter({2: 2, 3: 2})
    assert Counter(move.receiver for move in moves) == Counter({0: 2, 1: 2})


def test_whole_means_all_that_saved() -> None:
    """However the parts are spread."""
    assert is_whole([HeldPart("a", (0, 1), 3), HeldPart("b"), HeldPart("c", (1, 2), 3)])
    assert not is_whole([HeldPart("a", (0, 1), 3), HeldPart("b")])
    assert not is_whole([HeldPart("a"), HeldPart("b")])  # of whom nobody can read the manifest
