"""PatternRule: a granularity mapping for all `fully_shard` calls of a stack, which sees to typing errors at the end.

Given to `fully_shard` itself, every pattern must match a parameter of that call. A stack makes many calls, and the
user cannot know which of them meets which parameter; so here a pattern must match in one of them.
"""

from __future__ import annotations

import difflib
import fnmatch
from collections.abc import Mapping

from torch import nn

from vescale_fsdp.layout.granularity import Granularity, check_rule, resolve_granularity


class PatternRule:
    """A function of name and parameter, as ``granularity=`` takes it, that remembers what matched.

    Args:
        mapping: from name patterns (fnmatch) to granularities, the first match wins. A name is the parameter's in the
            module that the stack shards, so ``*down_proj.weight`` is right wherever that begins.
    """

    def __init__(self, mapping: Mapping[str, Granularity | str]) -> None:
        check_rule(mapping)
        self._mapping = dict(mapping)
        self._matched: set[str] = set()
        self._names: dict[str, None] = {}

    def __call__(self, fqn: str, param: nn.Parameter) -> Granularity:
        """The granularity of one parameter; Element where no pattern matches."""
        self._names[fqn] = None
        self._matched.update(pattern for pattern in self._mapping if fnmatch.fnmatchcase(fqn, pattern))
        return resolve_granularity(self._mapping, fqn, param)

    def unmatched(self) -> dict[str, list[str]]:
        """Patterns that no parameter matched, each with the names nearest to it; empty before any parameter came."""
        if not self._names:
            return {}
        return {
            pattern: difflib.get_close_matches(pattern, self._names, n=3, cutoff=0.3)
            for pattern in self._mapping
            if pattern not in self._matched
        }
