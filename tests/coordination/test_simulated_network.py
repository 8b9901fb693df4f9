"""One law over a simulated network: all values are right, or every rank names the one that is at fault.

Ranks as threads, with their real meeting, trees and channels. The network delays, tears, refuses and has strangers. At
a drawn moment a rank leaves, dies, ends or stands still, or a connection is cut or passes nothing any more.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, final

import numpy as np
import pytest

from tests.support.simulated_network import Network
from tests.support.socket_ranks import HANG_SECONDS, on_threads, summed
from torchdistinput.coordination import tree
from torchdistinput.coordination.channel import Channel
from torchdistinput.coordination.exchanges import StartedExchange
from torchdistinput.coordination.meeting import Meeting, Met
from torchdistinput.coordination.tree import ALL, DIED, Left, parent_of
from torchdistinput.errors import RankLost

EXCHANGES: Final = 10
LANES: Final = 2  # channels of each rank, on threads of their own
SIZES: Final = (1, 1, 34, 34, 509, 511, 2_000, 20_000)  # words: below, at and above what is sent in one piece
EVENTS: Final = ("none", "none", "leaves", "dies", "ends", "stands still", "cut", "silence")
NAMED, TO_THE_END = "named", "came to the end"


@final
class Play:
    """What all ranks do, which follows from the seed.

    Attributes:
      event: what happens.
      at: the exchange before which it happens, on the first channel.
      rank: the rank to which it happens; of a connection, the one below.
    """

    def __init__(self, seed: int) -> None:
        self.seed = seed
        dice = random.Random(f"play {seed}")
        self.num_ranks = dice.choice([2, 3, 4, 5, 9, 12])
        self.fan_out = dice.choice([8, 2, 3])
        self.event = EVENTS[seed % len(EVENTS)]
        self.at = dice.randrange(EXCHANGES)
        self.rank = dice.randrange(int(self.event in ("cut", "silence")), self.num_ranks)
        self.after = dice.choice([0, 1, 24, 40, 200])
        kinds = ["sum", "sum", "text", "rows", "first", "merge"]
        self.schedule = [[(dice.choice(kinds), dice.choice(SIZES)) for _ in range(EXCHANGES)] for _ in range(LANES)]
        self.is_gone = False  # the rank to which it happens
        self.is_named = False  # by each that waited, at one moment
        self.late: dict[tuple[int, int], list[int]] = {}
        self.waiting = {(rank, lane) for rank in range(self.num_ranks) for lane in range(LANES)}

    def culprit(self, rank: int) -> int:
        """Whom a rank must name: of a connection, who is on its other side."""
        if self.event in ("cut", "silence"):
            above: int | None = rank
            while above is not None and above != self.rank:
                above = parent_of(above)
            return self.rank if above is None else parent_of(self.rank) or 0
        return self.rank

    def concerns(self, lane: int) -> bool:
        """Whether the event ends a channel: one that a rank leaves is the first one, all others end all."""
        return self.event != "none" and (lane == 0 or self.event != "leaves")

    def words(self, rank: int, lane: int, number: int) -> Any:
        length = self.schedule[lane][number][1]
        return np.random.default_rng([self.seed, rank, lane, number]).integers(-(2**40), 2**40, length)

    def text(self, rank: int, lane: int, number: int) -> str:
        dice = random.Random(f"{self.seed} {rank} {lane} {number}")
        return dice.choice(["a", "b", "ü", "\udcff"]) * dice.choice([0, 7, 2039, 2041, dice.randrange(10_000)])

    def begin(self, channel: Channel, lane: int, number: int) -> tuple[Any, Any]:
        """An exchange, and what it must come to."""
        everyone, kind = range(self.num_ranks), self.schedule[lane][number][0]
        if kind in ("text", "merge"):
            texts = [self.text(each, lane, number) for each in everyone]
            if kind == "text":
                return channel.gather(texts[channel.rank]), texts
            lines = [f"{rank} {text}".encode(errors="surrogatepass") for rank, text in enumerate(texts)]
            return channel.merge(lines[channel.rank], b"\n".join), b"\n".join(lines)
        rows = [self.words(each, lane, number) for each in everyone]
        if kind == "rows":
            return channel.gather_bytes(rows[channel.rank].tobytes()), [row.tobytes() for row in rows]
        if kind == "first":
            return channel.first(rows[channel.rank].tobytes()), rows[0].tobytes()
        return summed(channel, rows[channel.rank].tolist()), np.sum(rows, axis=0).tolist()

    def strike(self, met: Met, channel: Channel, network: Network) -> bool:
        """Makes the event happen, on the rank to which it does. Whether the rank goes on."""
        if self.event == "leaves":
            channel.abort("had enough")
        elif self.event == "dies":
            met.tree.left[ALL] = Left(self.rank, DIED, DIED)  # the others see that the connections end
            for link in met.tree.links():
                link.close()
        elif self.event == "ends":
            self.is_gone = True
            met.tree.end()
        elif self.event != "stands still":
            parent = met.tree.link(met.tree.parent or 0)
            assert parent is not None
            network.strike(parent.socket.getsockname()[1], cuts=self.event == "cut", after=self.after)
            return True
        return self.event == "leaves"

    def all_name_it(self) -> bool:
        """Whether each that waits names whom it must name, and nobody else."""
        here = [each for each in self.waiting if self.event != "stands still" or each[0] != self.rank]
        return all(self.late.get(each) == [self.culprit(each[0])] for each in here)

    def run(self, met: Met, lane: int, network: Network) -> str:
        """One rank on one channel: how it ends."""
        rank, dice = met.tree.rank, random.Random(f"{self.seed} {met.tree.rank} {lane}")
        channel = Channel(met.tree, lane + 1, range(self.num_ranks))
        try:
            for number in range(EXCHANGES):
                strikes = lane == 0 and rank == self.rank and number == self.at and self.event != "none"
                if strikes and not self.strike(met, channel, network):
                    return self.event
                exchange, expected = self.begin(channel, lane, number)
                begun = StartedExchange(exchange)
                for _ in range(dice.choice([0, 0, 3, 30])):
                    begun.poll()
                until = time.monotonic() + HANG_SECONDS
                while not begun.poll():
                    begun.rest(0.05)
                    if self.is_gone and rank == self.rank:
                        return self.event
                    self.late[rank, lane] = channel.late()
                    if self.event in ("stands still", "silence") and (self.is_named or self.all_name_it()):
                        self.is_named = True  # who returns tells those below no more for whom it waits
                        return NAMED
                    assert time.monotonic() < until, (self.seed, rank, lane, number, channel.late())
                self.late.pop((rank, lane), None)
                assert begun.conclude() == expected, (self.seed, rank, lane, number)
                time.sleep(dice.choice([0.0] * 20 + [1e-3, 1e-2]))
        except RankLost as error:
            return str(error)
        finally:
            self.waiting.discard((rank, lane))
        return TO_THE_END


def met_over(network: Network, num_ranks: int) -> list[Met]:
    """All ranks meet."""

    def meet(rank: int) -> Met:
        made = Meeting(rank, range(num_ranks), HANG_SECONDS, host=None, interface="lo", ports="")
        return made.wait_for_all(lambda _: network, "")

    found = on_threads([partial(meet, rank) for rank in range(num_ranks)])
    for each in found:
        if isinstance(each, BaseException):
            raise each
    return found


@pytest.mark.parametrize("seed", range(40))
def test_all_values_are_right_or_every_rank_names_the_one_at_fault(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    play, network = Play(seed), Network(seed, is_rough=bool(seed % 3))
    monkeypatch.setattr(tree, "FAN_OUT", play.fan_out)
    found: Sequence[Met] = ()
    try:
        found = met_over(network, play.num_ranks)
        assert network.open_ports() == []
        for link in [link for each in found for link in each.tree.links()] if seed % 2 else ():
            link.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # the system takes frames in parts
        assert len({each.token for each in found}) == 1
        places = [(rank, lane) for rank in range(play.num_ranks) for lane in range(LANES)]
        calls: list[Callable[[], str]] = [partial(play.run, found[rank], lane, network) for rank, lane in places]
        ends = on_threads(calls)
    finally:
        for each in found:
            each.tree.end()
        network.close()
    for (rank, lane), end in zip(places, ends, strict=True):
        where = (play.seed, play.event, rank, lane, end)
        if end in (TO_THE_END, NAMED):
            assert end == TO_THE_END or play.event in ("stands still", "silence"), where
        elif rank == play.rank and play.event not in ("cut", "silence"):
            assert end == play.event or "cannot go on" in end, where
        else:
            assert play.concerns(lane), where
            assert isinstance(end, str), where
            assert f"rank {play.culprit(rank)} " in end, where
