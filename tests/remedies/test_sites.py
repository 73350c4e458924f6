"""Every site with a remedy has a test that runs it, or a reviewed reason; remedies name options that exist."""

from __future__ import annotations

import importlib
import re
from collections import Counter
from pathlib import Path

from tests.remedies.applied import RUN, options
from tests.remedies.reviewed import REVIEWED
from tests.remedies.sites import sites
from tests.support.command import COMMANDS

FOREIGN = {"--ckpt-format", "--repo-type", "--revision"}  # Megatron's, and of hf


def test_every_remedy_is_run_or_reviewed() -> None:
    """Each site once: a new one without a test, and an entry for a site that is gone, are named."""
    for file in Path(__file__).parent.glob("test_*.py"):
        importlib.import_module(f"{__package__}.{file.stem}")
    ran = {site for claimed in RUN.values() for site in claimed}
    listed = Counter(
        f"{file}::{function}"
        for by_file in REVIEWED.values()
        for file, functions in by_file.items()
        for function in functions.split()
    )
    reviewed = {*listed}
    assert sites()
    assert sorted(sites().keys() - ran - reviewed) == [], "neither a test nor a reason"
    assert sorted((ran | reviewed) - sites().keys()) == [], "no such site"
    assert sorted(ran & reviewed) + [site for site, count in listed.items() if count > 1] == [], "twice"


def test_remedies_name_what_there_is() -> None:
    """Every option and every command, in every remedy, run or not."""
    for site, (_, _, text) in sites().items():
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) - FOREIGN
        assert named <= options().keys(), site
        assert set(re.findall(r"vescale-convert ([a-z][\w-]*)", text)) <= COMMANDS.keys(), site
