"""The tests of several hosts: skipped where hosts cannot be made; most of them run with ``scripts/test --all`` only."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from tests.network.lab import Lab, hosts, why_not

RANDOM_WORLDS = {0: 2, 1: 3, 2: 2, 3: 3, 4: 3, 5: 2}
"""The ranks of the random programs of each seed."""
ALWAYS = {
    "test_a_host_that_stays_away_is_named_on_all_ranks[stream]",
    "test_programs_over_a_network_that_goes_and_comes_back[1]",
    "test_a_firewall_is_named_with_the_way_out[drop]",
    "test_an_elastic_job_comes_back_on_all_hosts_after_a_death",
    "test_a_host_whose_own_name_is_a_loopback_address",
}
"""The tests that ``scripts/test`` runs, where it can."""


@pytest.fixture(scope="session")
def impossible() -> str | None:
    """Why hosts cannot be made here."""
    return why_not()


@pytest.fixture(autouse=True)
def chosen(request: pytest.FixtureRequest, impossible: str | None, *, all_cells: bool) -> None:
    """Skips what cannot run here, or is not asked for."""
    if impossible is not None:
        pytest.skip(impossible)
    if not all_cells and not ALWAYS & {request.node.name, request.node.originalname}:
        pytest.skip("a test of several hosts: run with --all")


@pytest.fixture
def lab() -> Iterator[Lab]:
    """Two hosts."""
    with hosts(2) as made:
        yield made


@pytest.fixture
def nft() -> None:
    """For a test that needs a firewall."""
    if shutil.which("nft") is None:
        pytest.skip("a firewall needs nft, of the package nftables")
