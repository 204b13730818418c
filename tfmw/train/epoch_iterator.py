"""Iterator over this worker's shard of a dataset, epoch after epoch, with its position.

    data = EpochIterator(source, group, sharding, steps=None, argument="steps_per_epoch")
    data.begin_epoch()
    while (call := data.next_call(max_steps=10)) is not None:
        steps = driver.run_steps("train", call)
        data.advance(steps, call.max_steps)
    data.end_epoch()

`position` is a `Cursor`. An iterator that is created with it, on any number of workers, continues
with the next batches in the same order.
"""

from __future__ import annotations

import dataclasses
import os
import warnings
from typing import Any

from tfmw import data
from tfmw.cluster.group import Group
from tfmw.compat import datasets
from tfmw.errors import UsageError


@dataclasses.dataclass(frozen=True)
class DriverCall:
    """The steps of one Python call of the driver."""

    first: int  # number of the first step in its epoch, from 0
    max_steps: int  # fewer steps are made only if the data ends
    shard_sizes: data.ShardSizes  # sizes of the shards in all of its steps
    iterator: Any  # iterator over the shard's dataset
    endless: bool = False  # whether that has no end


class EpochIterator:
    """Reads a source, epoch after epoch.

    Args:
        source: the user's data.
        group: the tasks that read it.
        sharding: the division of global batches.
        steps: number of steps of one epoch; None for one pass over the data.
        argument: the name of the user's argument for `steps`.
        position: a `Cursor` of an interrupted run, as JSON; see `restore_position`.
        index_dir: directory that keeps the indices of files of records, with which a run resumes at
            once.
        steps_per_execution: attribute of the model.

    Raises:
        UsageError: an empty dataset, an infinite one without `steps`, or data that differs between
            tasks.
    """

    def __init__(
        self,
        source: data.Source,
        group: Group,
        sharding: data.Sharding,
        steps: int | None,
        argument: str,
        position: dict[str, Any] | None = None,
        index_dir: str | None = None,
        steps_per_execution: int = 1,
    ):
        self._steps_per_execution = steps_per_execution
        self._source = source
        self._group = group
        self._sharding = sharding
        self._requested_steps = steps
        was = self._restored = None if position is None else data.Cursor(**position)
        seed = group.from_chief(_draw_seed) if was is None else was.seed
        # Those of the chief's machine: a resumed run has the order of the first one.
        cycle_lengths = {} if was is None else was.source["cycle_lengths"]
        self._order = data.SharedOrder(seed, group, index_dir, cycle_lengths)
        # number of the pass of the shard, if each pass has a shard of its own
        self._shard_pass = 0 if was is None else was.passes - (was.in_pass is not None)
        self._indexing: list[Any] | None = None  # processes that create indices
        self._passes = 0
        self.iterator: Any = None  # iterator of the current pass; None between two passes
        self._steps_in_pass = 0
        self._all_passes: Any = None  # iterator of a shard that has them, and the batches it read:
        self._batches_read = 0
        self._pass_end: Any = None  # the most steps of the current pass; see `Shard.steps`
        self._orders: list[int] = []  # orders before the current pass, for each of these shuffles:
        self._reshuffles: Any = ()
        self._ended = False
        self.steps_done = 0  # steps in this epoch
        self._batches_per_step = source.batches_per_step(sharding)
        self._steps_of_resumed: int | None = None  # set if other replicas began the epoch
        if group.size > 1:
            source.refuse_different(group.from_all)
        self.shard = source.shard(sharding, self._order_of(self._shard_pass))
        if steps is None and self.shard.steps == data.INFINITE:
            raise UsageError(
                f"the dataset is infinite and {argument} was not given: pass {argument}=..., or "
                "end the dataset with take()."
            )
        # The most steps of a pass; None if unknown, and for infinite data.
        self._pass_steps: int | None = None
        self._limit_passes()

    # ------------------------------------------------------------ steps

    @property
    def at_epoch_end(self) -> bool:
        """Whether it is known that the epoch has no further step."""
        return self._ended or (self._total is not None and self.steps_done >= self._total)

    @property
    def _total(self) -> int | None:
        """The most steps of this epoch, if known."""
        return self._steps_of_resumed or self.steps_per_epoch

    def _limit_passes(self, steps: int | None = None) -> None:
        """Sets the most steps of a pass.

        Args:
            steps: for data of unknown length.
        """
        known = self.shard.steps
        self._pass_steps = steps if known is None else None if known == data.INFINITE else known
        requested = self._requested_steps
        self.steps_per_epoch = self._pass_steps if requested is None else requested

    def reset(self) -> None:
        """Starts a call of `fit` or an evaluation."""
        length = self.shard.hooks.length()
        if length is not None:
            self.shard.steps = -(-length // self._batches_per_step)
        self._limit_passes()
        self.shard.hooks.reset()

    def begin_epoch(self) -> None:
        """Starts an epoch; the first one after `restore_position` continues the interrupted one."""
        was, self._restored = self._restored, None
        continued = was is not None and was.begun
        self.steps_done = was.done if was is not None else 0
        new_pass = self.iterator is None or (self._requested_steps is None and not self.steps_done)
        if new_pass:
            self._begin_pass()
        self.shard.hooks.begin(new_pass, continued)
        self._ended = False

    def next_call(self, max_steps: int) -> DriverCall | None:
        """The next steps, at most `max_steps`; None if the epoch is over."""
        if self._ended:
            return None
        if self._total is not None:
            max_steps = min(max_steps, self._total - self.steps_done)
        sizes = self.shard.full
        if max_steps > 0 and self._pass_end not in (None, data.INFINITE):
            left = self._pass_end - self._steps_in_pass
            if left <= 0:
                self._run_out()
            elif left == 1:
                sizes = self.shard.last
            elif self.shard.last != self.shard.full:
                left -= 1  # the last step has its own call
            max_steps = min(max_steps, left)
        if max_steps <= 0:
            self._ended = True
            return None
        endless = self.shard.has_all_passes
        return DriverCall(self.steps_done, max_steps, sizes, self.iterator, endless)

    def advance(self, steps: int, max_steps: int) -> None:
        """Counts the steps of a call; fewer than `max_steps` mean that the data has ended.

        Raises:
            UsageError: the dataset is empty.
        """
        self.steps_done += steps
        self._steps_in_pass += steps
        self._batches_read += steps
        if self.steps_done == steps:  # the first call of an epoch
            self._source.journal.refuse_other_elements(self._group)
        if steps == max_steps:
            return
        self._ended = True
        if self._passes == 1 and not self._steps_in_pass and self.shard.steps is None:
            raise data.empty_dataset()
        if self._pass_steps is None and self.shard.steps is None:
            # As in Keras, no later pass has more steps than the first one plus the call that found
            # its end.
            per_call = self._steps_per_execution
            self._limit_passes((-(-self._steps_in_pass // per_call) + 1) * per_call)
        known = self.shard.steps is not None
        if self._requested_steps is not None or known or not self.steps_done:
            self._run_out()

    def end_epoch(self) -> None:
        """Ends the epoch; call it after `next_call` has returned None."""
        self._source.journal.refuse_other_elements(self._group)
        self.shard.hooks.end()
        self._steps_of_resumed = None
        shard = self.shard
        if self._requested_steps is None:
            if shard.reshuffles.ahead and self.iterator is not None:
                next(self.iterator, None)  # a `repeat` restarts its input to notice its end
            complete = self._pass_end == self._steps_in_pass
            self._end_pass()
            if complete and datasets.is_dataset(self._source.x):
                # Keras starts a pass here and another one in the next epoch.
                self._passes += 1
                if shard.reshuffles and not shard.reshuffles.pass_over():
                    self._iterate(shard, shard.reshuffles.passes)
        elif self._pass_end == self._steps_in_pass:
            self._end_pass()
            if datasets.is_dataset(self._source.x):
                self._begin_pass()  # as Keras does, even if no epoch follows

    def leave(self) -> None:
        """Ends the current pass; the user's dataset continues as after Keras's calls."""
        self.shard.hooks.leave()
        self.end_indexing()
        if self.iterator is not None:
            if self._reshuffles:
                self._reshuffles.passes = self._orders_left()
            self.iterator = None

    def abandon(self) -> None:
        """Drops the current pass after an error."""
        self.end_indexing()
        for iterator in {self.iterator, self._all_passes} - {None}:
            datasets.end_in_background(iterator)
        self.iterator = self._all_passes = None

    def _orders_left(self) -> list[int]:
        return self._reshuffles.left_after(self._steps_in_pass) if self._reshuffles else []

    def _begin_pass(self, skip: int = 0, batches: int = 0) -> None:
        """Starts a pass after `skip` steps, which read so many batches."""
        shard = self.shard
        if skip and shard.steps not in (None, data.INFINITE):
            before = batches // self._batches_per_step
            if before >= shard.steps:
                raise UsageError(
                    f"the backup was taken after {before} steps of a pass over the data, which now "
                    f"has {shard.steps} steps: the run cannot resume after its end. Pass the data "
                    "of the interrupted run, or another backup_dir to begin anew."
                )
        source = self._source
        is_current = self._shard_pass == self._passes or not source.has_shards_of_passes
        read_once = skip and source.is_read_once and batches % self._batches_per_step == 0
        begins_anew = not (read_once or shard.has_all_passes)
        if read_once:
            rest = shard.batches(batches, self._batches_per_step)
            shard = dataclasses.replace(shard, dataset=rest)
        elif begins_anew and (skip or not is_current):
            # Elements are skipped below the maps, so that they are not decoded.
            shard = source.shard(self._sharding, self._order_of(self._passes), batches)
            if not skip:
                self.shard, self._shard_pass = shard, self._passes
        self._pass_end = self._pass_steps
        if batches != skip * self._batches_per_step and self._pass_steps is not None:
            # Other replicas began this pass.
            rest = self._pass_steps - batches // self._batches_per_step
            self._pass_end = skip + ((shard.steps or 0) if begins_anew else rest)
        passes, self._passes, self._steps_in_pass = self._passes, self._passes + 1, skip
        if shard.has_all_passes:
            self.iterator = self._iterate_from(passes * (shard.steps or 0) + batches)
            return
        self._reshuffles = shard.reshuffles
        # Pipelines of a function may differ between workers, but all must enter the all-gather. The
        # counting shard is that of all passes: the function has just created another one, to skip
        # in it.
        counted = self.shard.reshuffles
        now = counted.passes if counted else []
        if counted or self._source.is_function():
            orders = self._group.from_chief(lambda: now)
            if counted:
                self._orders = orders
        self.iterator = self._iterate(shard, self._orders, now if shard is self.shard else None)

    def _iterate_from(self, batch: int) -> Any:
        """Iterates over all passes from a batch on, which mostly follows the last pass."""
        if self._all_passes is None or self._batches_read != batch:
            rest = self.shard.batches(batch) if batch else self.shard.dataset
            self._all_passes, self._batches_read = iter(rest), batch
        return self._all_passes

    def _order_of(self, number: int) -> data.SharedOrder:
        """The order of a pass."""
        if not self._source.has_shards_of_passes:
            return self._order
        return dataclasses.replace(self._order, seed=self._order.seed + number)

    def _iterate(self, shard: data.Shard, orders: list[int], now: list[int] | None = None) -> Any:
        """Iterates from a position in the sequences of orders; `now`: the user's dataset's."""
        if not shard.reshuffles:
            return iter(shard.dataset)
        shard.reshuffles.begin(orders, now)
        iterator = iter(shard.dataset)
        shard.reshuffles.note_iterator()
        return iterator

    def _end_pass(self) -> None:
        """Counts the passes of shuffles below others, which began with the first element."""
        if self.iterator is not None and self._reshuffles:
            if self._reshuffles.cached:
                next(self.iterator, None)  # a cache is full only after it has seen the end
            self._reshuffles.note(ended=True)
        self.iterator = None

    def _run_out(self) -> None:
        self.iterator = None
        if self._group.is_chief:
            warnings.warn(
                "Your input ran out of data; interrupting training. Make sure that your dataset "
                "or generator can generate at least `steps_per_epoch * epochs` batches. You may "
                "need to use the `.repeat()` function when building your dataset.",
                stacklevel=2,
            )

    # ------------------------------------------------------------ position

    def position(self, in_epoch: bool) -> data.Cursor:
        """The position in the data; `in_epoch`: whether an epoch has started and not ended."""
        in_pass = self._steps_in_pass if self.iterator is not None else None
        now = self.shard.reshuffles.passes if self.shard.reshuffles else []
        state = {
            "orders_now": now,
            "orders": now if in_pass is None else self._orders,
            "orders_left": now if in_pass is None else self._orders_left(),
            "kept": self.shard.reshuffles.kept,
            "cycle_lengths": self._order.cycle_lengths,
        }
        if in_pass is not None:
            state["drawn_from"] = self.shard.hooks.state(in_pass * self._batches_per_step)
        return data.Cursor(
            seed=self._order.seed,
            passes=self._passes,
            in_pass=in_pass,
            done=self.steps_done if in_epoch else 0,
            begun=in_epoch,
            steps=self.steps_per_epoch,
            pass_steps=self._pass_steps,
            batches_per_step=self._batches_per_step,
            source=state,
        )

    def index_files(self) -> None:
        """Starts to create the indices that a resumed run will read."""
        index_dir, x = self._order.index_dir, self._source.x
        if index_dir is not None and self._indexing is None and datasets.is_dataset(x):
            self._indexing = data.index_in_background(x, index_dir)

    def end_indexing(self) -> None:
        """Ends the processes of `index_files`; also called after an error."""
        for process in self._indexing or ():
            process.kill()
            process.wait()
        self._indexing = None

    def restore_position(self) -> None:
        """Restores the position, with the same next batches on any number of workers."""
        was = self._restored
        assert was is not None
        if was.batches_per_step == self._batches_per_step:
            own = self._requested_steps is None
            self._limit_passes(was.pass_steps or (was.steps if own else None))
        self._passes = was.passes - (was.in_pass is not None)
        for _ in range(self._passes):
            self.shard.hooks.skip()
        orders = self.shard.reshuffles
        if orders:
            orders.passes, orders.kept = was.source["orders"], was.source["kept"]
        if was.in_pass is not None:
            self.shard.hooks.restore(was.source["drawn_from"])
            self._begin_pass(was.in_pass, was.in_pass * was.batches_per_step)
            if self._requested_steps is None and was.batches_per_step != self._batches_per_step:
                self._steps_of_resumed = self._pass_end
        self.restore_orders("orders_now")

    def restore_orders(self, name: str) -> None:
        """Sets how many orders the user's shuffles have had: `name` of the cursor's source."""
        orders = None if self._restored is None else self._restored.source[name]
        if orders is not None and self.shard.reshuffles:
            self.shard.reshuffles.passes = orders


def _draw_seed() -> int:
    """The global seed, so that seeded runs are equal; a random seed if there is none."""
    seed = datasets.global_seed()
    return (int.from_bytes(os.urandom(4)) if seed is None else seed) & 0x7FFFFFFF
