"""The migration tables: what a user has, and what to write instead, as code that the tests run.

``markdown()`` makes the tables of ``examples/coming_from.md``. ``ecosystem/test_migration*.py`` run each row; its names
are ``N`` ranks, ``B`` samples per rank, ``G`` per global batch, and what earlier rows made.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Args:
      before: the code as it was, a line each.
      after: the code that takes its place; none if there is nothing to do.
      why: what changes with it.
    """

    before: tuple[str, ...]
    after: tuple[str, ...]
    why: str = ""

    def markdown(self) -> str:
        """The row of a table."""
        cells = ("<br>".join(f"`{line}`" for line in code) or "nothing" for code in (self.before, self.after))
        return f"| {' | '.join(cells)} | {self.why} |"


def run(code: tuple[str, ...], scope: dict[str, Any]) -> dict[str, Any]:
    """Executes a cell with the names it needs; what it assigns is added to them."""
    exec("\n".join(code), scope)
    return scope


def result(code: tuple[str, ...], scope: dict[str, Any]) -> Any:
    """The value of a cell's last line, an expression, after the others were executed."""
    return eval(code[-1], run(code[:-1], scope))


FROM_SAMPLER = {
    "world": Row(
        ("dist.get_rank(), dist.get_world_size()",),
        ("strategy.rank, strategy.world_size",),
        "`strategy = tdi.Strategy()` also makes the group, if torchrun started the script and nobody made it",
    ),
    "divide": Row(
        ("loader = DataLoader(dataset, batch_size=B, sampler=DistributedSampler(dataset))",),
        ("loader = strategy.distribute_dataset(DataLoader(dataset, batch_size=B * N, shuffle=True))",),
        "the batch size is the global one; no sample is repeated to fill up",
    ),
    "drop-in": Row(
        ("loader = DataLoader(dataset, batch_size=B, sampler=DistributedSampler(dataset))",),
        ("loader = tdi.DataLoader(dataset, batch_size=B * N, shuffle=True)",),
        "the same without a strategy; batches stay on the CPU",
    ),
    "epochs": Row(
        ("loader.sampler.set_epoch(epoch)",),
        (),
        "each `iter(loader)` is the next epoch and shuffles anew",
    ),
    "same steps": Row(
        ("loader = DataLoader(dataset, batch_size=B, sampler=DistributedSampler(dataset, drop_last=True))",),
        ("loader = strategy.distribute_dataset(DataLoader(dataset, batch_size=B * N, shuffle=True))",),
        "`drop_last` is not needed for equal numbers of steps: a rank without samples gets a batch of size 0",
    ),
    "other samplers": Row(
        (
            "sampler = WeightedRandomSampler(weights, 8)",
            "loader = DataLoader(dataset, batch_size=B, sampler=sampler)",
        ),
        (
            "sampler = WeightedRandomSampler(weights, 8)",
            "loader = strategy.distribute_dataset(DataLoader(dataset, batch_size=G, sampler=sampler))",
        ),
        "any sampler or batch sampler of one process; before, each rank drew 8 of its own",
    ),
    "device": Row(
        ("x = x.to(device, non_blocking=True)",),
        (),
        "elements are on `strategy.device`, copied ahead; so no `pin_memory` either",
    ),
    "loss": Row(
        ("loss = losses.mean()",),
        ("loss = tdi.average_loss(losses, loader.step)",),
        'exact for parts of different sizes; `losses` has one entry per sample (`reduction="none"`)',
    ),
    "metric": Row(
        ("correct = hits.sum()", "dist.all_reduce(correct)", "correct / len(sampler) / N"),
        ('strategy.reduce("MEAN", hits, axis=0)',),
        "over each sample once, however uneven the parts",
    ),
}

FROM_ACCELERATE = {
    "world": Row(
        ("accelerator.process_index, accelerator.num_processes, accelerator.is_main_process",),
        ("strategy.rank, strategy.world_size, strategy.rank == 0",),
    ),
    "divide": Row(
        ("loader = accelerator.prepare(DataLoader(dataset, batch_size=B))",),
        ("loader = strategy.distribute_dataset(DataLoader(dataset, batch_size=B * N))",),
        "a step has the same samples as before",
    ),
    "split_batches": Row(
        (
            "config = DataLoaderConfiguration(split_batches=True)",
            "loader = Accelerator(dataloader_config=config).prepare(DataLoader(dataset, batch_size=G))",
        ),
        ("loader = strategy.distribute_dataset(DataLoader(dataset, batch_size=G))",),
        "the same parts while `N` divides `G`; it need not: any `G` will do",
    ),
    "even_batches": Row(
        (
            "config = DataLoaderConfiguration(even_batches=False)",
            "loader = Accelerator(dataloader_config=config).prepare(DataLoader(dataset, batch_size=B))",
        ),
        ("loader = strategy.distribute_dataset(DataLoader(dataset, batch_size=B * N))",),
        "no repeats as with `even_batches=True`, and no `join_uneven_inputs`: ranks make the same steps",
    ),
    "gather_for_metrics": Row(
        ("accelerator.gather_for_metrics(x)",),
        ("strategy.gather(x, axis=0)",),
        "nothing to cut off, so it is right for any data, and at any place in the loop",
    ),
    "ordered": Row(
        ("index, scores = accelerator.gather_for_metrics((index, scores))", "scores[index.argsort()]"),
        ("strategy.gather_ordered(index, scores)",),
        "`InputOptions(with_index=True)` yields `(index, element)`; outputs may be nested, and lists of strings",
    ),
    "pad": Row(
        ("accelerator.gather(accelerator.pad_across_processes(scores))",),
        ("strategy.gather(scores, axis=0)",),
        "sizes may differ; no padding in the result",
    ),
    "reduce": Row(
        ('accelerator.reduce(losses.mean(), "mean")',),
        ('strategy.reduce("MEAN", losses, axis=0)',),
        "the mean over samples, not over ranks",
    ),
    "backward": Row(
        ("accelerator.backward(losses.mean())",),
        ("accelerator.backward(tdi.average_loss(losses, loader.step))",),
        "or `.backward()`, without an accelerator",
    ),
    "prepare": Row(
        ("model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",),
        ("model, optimizer = accelerator.prepare(model, optimizer)",),
        "accelerate may keep the model and the optimizer",
    ),
}

FROM_TENSORFLOW = {
    "strategy": Row(('tf.distribute.MirroredStrategy(["cpu:0", "cpu:1"])',), ('tdi.Strategy(["cpu", "cpu"])',)),
    "dataset": Row(
        ("strategy.experimental_distribute_dataset(dataset.batch(G))",),
        ("strategy.distribute_dataset(dataset, global_batch_size=G)",),
        "a torch `DataLoader` is taken too, with its own batch size",
    ),
    "function": Row(
        ("strategy.distribute_datasets_from_function(dataset_fn)",),
        ("strategy.distribute_datasets_from_function(dataset_fn)",),
    ),
    "policy": Row(
        (
            "options = tf.data.Options()",
            "options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA",
            "dataset = dataset.with_options(options)",
        ),
        ("tdi.InputOptions(auto_shard_policy=tdi.AutoShardPolicy.DATA)",),
        "given to `distribute_dataset`",
    ),
    "step": Row(
        ("strategy.run(train_step, args=(element,))",),
        ("strategy.run(train_step, args=(element,))",),
        "not needed with one device per process",
    ),
    "loss": Row(
        ("tf.nn.compute_average_loss(losses, global_batch_size=G)",),
        ("tdi.average_loss(losses, loader.step)",),
        "divides by the samples that the step has, also when it is short",
    ),
    "reduce": Row(
        ("strategy.reduce(tf.distribute.ReduceOp.SUM, value, axis=None)",),
        ("strategy.reduce(tdi.ReduceOp.SUM, value)",),
    ),
    "gather": Row(("strategy.gather(value, axis=0)",), ("strategy.gather(value, axis=0)",)),
    "local": Row(("strategy.experimental_local_results(value)",), ("strategy.local_results(value)",)),
    "values": Row(
        ("strategy.experimental_distribute_values_from_function(value_fn)",),
        ("strategy.distribute_values_from_function(value_fn)",),
    ),
    "context": Row(
        ("tf.distribute.get_replica_context().replica_id_in_sync_group",),
        ("tdi.get_replica_context().replica_id_in_sync_group",),
    ),
    "optional": Row(
        ("iter(loader).get_next_as_optional().has_value()",), ("iter(loader).get_next_as_optional().has_value()",)
    ),
    "spec": Row(("loader.element_spec",), ("loader.element_spec",)),
    "list_files": Row(
        ("tf.data.Dataset.list_files(pattern, shuffle=False)",),
        ("tdi.list_files(pattern)",),
    ),
    "records": Row(("tf.data.TextLineDataset(files)",), ("tdi.FileDataset(files, tdi.readers.text_lines)",)),
}

FROM_WEBDATASET = {
    "read": Row(
        ("dataset = wds.WebDataset(urls, shardshuffle=False)",),
        ("dataset = tdi.FileDataset(urls, tdi.readers.webdataset())",),
        "`urls`: names, patterns and braces, local or of any fsspec protocol; a sample has `__key__`, but no `__url__`",
    ),
    "decode": Row(
        ('dataset = wds.WebDataset(urls, shardshuffle=False).decode().to_tuple("npy", "cls")',),
        (
            'read = tdi.readers.webdataset(decode="auto", keys=["npy", "cls"])',
            'dataset = tdi.FileDataset(urls, read, map_fn=lambda sample: (sample["npy"], sample["cls"]))',
        ),
        "other members are not read; pickles stay bytes",
    ),
    "decoder": Row(
        ('dataset = wds.WebDataset(urls, shardshuffle=False).decode(wds.handle_extension("bin", decode))',),
        (
            'read = tdi.readers.webdataset(decode={"bin": decode, "cls": "cls", "npy": "npy"})',
            "dataset = tdi.FileDataset(urls, read)",
        ),
        "as for `jpg` and the function of an image library; called only for the samples that this rank keeps",
    ),
    "shuffle": Row(
        ("dataset = wds.WebDataset(urls, shardshuffle=100).shuffle(1000)",),
        (
            "read = tdi.readers.webdataset()",
            "dataset = tdi.FileDataset(urls, read, shuffle_files=True, shuffle_buffer=1000, cycle_length=4)",
        ),
        "new in each epoch, by `seed=`; the same at any number of loader workers, and entered anywhere on a resume",
    ),
    "split": Row(
        (
            "dataset = wds.WebDataset(urls, shardshuffle=False, nodesplitter=wds.split_by_node)",
            "loader = DataLoader(dataset, batch_size=B, num_workers=2, collate_fn=list)",
        ),
        (
            "dataset = tdi.FileDataset(urls, tdi.readers.webdataset())",
            "loader = DataLoader(dataset, batch_size=B * N, num_workers=2, collate_fn=list)",
            "loader = strategy.distribute_dataset(loader)",
        ),
        "each sample once, and equal steps on all ranks: so no `resampled=True`, `with_epoch` or `repeat`",
    ),
}

FROM_TORCHDATA = {
    "loader": Row(
        ("loader = StatefulDataLoader(dataset, batch_size=B, num_workers=2)",),
        ("loader = tdi.DataLoader(dataset, batch_size=B * N, num_workers=2)",),
        "the batch size is the global one, and the data is divided here",
    ),
    "save": Row(
        ("state = loader.state_dict()",),
        ("state = loader.state_dict()",),
        "the same on every rank: save one, not one for each rank",
    ),
    "load": Row(
        ("loader.load_state_dict(state)",),
        ("loader.load_state_dict(state)",),
        "at any number of ranks, and of loader workers",
    ),
}

FROM_GRAIN = {
    "shard": Row(
        ("loader = grain.MapDataset.source(data)[rank::N].batch(B)",),
        ("loader = tdi.DataLoader(grain.MapDataset.source(data), batch_size=B * N)",),
        "no sample is left out where `N` does not divide, and ranks make the same steps",
    ),
    "shuffle": Row(
        ("loader = grain.MapDataset.source(data).shuffle(seed=1)",),
        ("loader = tdi.DataLoader(grain.MapDataset.source(data), sampler=tdi.ShuffleSampler(len(data), seed=1))",),
        "another order, with random access as there; each `iter` is the next epoch",
    ),
    "mix": Row(
        ("loader = grain.MapDataset.mix([a, b], weights=[0.75, 0.25])",),
        ('loader = tdi.Mixture({"a": a, "b": b}, {"a": 0.75, "b": 0.25})',),
        "the weights name the sources; `stop=` says where an epoch ends",
    ),
    "state": Row(
        ("state = iterator.get_state()",),
        ("state = loader.state_dict()",),
        "and `loader.load_state_dict(state)` for `set_state`, at any number of ranks",
    ),
}

FROM_MOSAICML = {
    "loader": Row(
        (
            "data = StreamingDataset(local=folder, shuffle=True, batch_size=B)",
            "loader = DataLoader(data, batch_size=B)",
        ),
        (
            "stream = StreamingDataset(local=folder, shuffle=False, batch_size=B)",
            "data = ByIndex(stream, stream.num_samples)",
            "loader = tdi.DataLoader(data, batch_size=B * N, shuffle=True)",
        ),
        "iterated, it drops or repeats samples until all ranks have as many; by index it does not",
    ),
    "state": Row(
        ("state = data.state_dict(num_samples, True)",),
        ("state = loader.state_dict()",),
        "no count of samples to keep",
    ),
    "nodes": Row(
        ("data = StreamingDataset(local=folder, num_canonical_nodes=2, batch_size=B)",),
        (),
        "the order does not depend on the number of ranks",
    ),
    "mix": Row(
        (
            "streams = [Stream(local=a, proportion=0.75), Stream(local=b, proportion=0.25)]",
            "mixed = StreamingDataset(streams=streams, batch_size=B)",
        ),
        (
            'weights = {"a": 0.75, "b": 0.25}',
            'mixed = tdi.Mixture({"a": data_a, "b": data_b}, weights, stop="repeat", num_samples=num_samples)',
        ),
        "`data_a = ByIndex(...)`; the shares are exact on the way, too",
    ),
}

FROM_LITDATA = {
    "loader": Row(
        ("loader = StreamingDataLoader(StreamingDataset(folder, shuffle=True), batch_size=B)",),
        (
            "data = ByIndex(StreamingDataset(folder, shuffle=False), length)",
            "loader = tdi.DataLoader(data, batch_size=B * N, shuffle=True)",
        ),
        "`length` from its `index.json`, as `len` is that of a rank's part",
    ),
    "state": Row(
        ("state = loader.state_dict()",),
        ("state = loader.state_dict()",),
        "at any number of ranks",
    ),
    "tail": Row(
        ("data = StreamingDataset(folder, drop_last=True)",),
        (),
        "ranks make the same steps; a rank without a sample gets a batch of size 0",
    ),
}

TABLES = {
    "`DistributedSampler`": FROM_SAMPLER,
    "accelerate": FROM_ACCELERATE,
    "`tf.distribute`": FROM_TENSORFLOW,
    "webdataset": FROM_WEBDATASET,
    "torchdata": FROM_TORCHDATA,
    "Grain": FROM_GRAIN,
    "MosaicML's streaming": FROM_MOSAICML,
    "LitData": FROM_LITDATA,
}


def markdown() -> str:
    """The tables as ``examples/coming_from.md`` has them."""
    lines = []
    for name, rows in TABLES.items():
        lines += [f"### From {name}", "", "| before | here | |", "| --- | --- | --- |"]
        lines += [row.markdown() for row in rows.values()] + [""]
    return "\n".join(lines)
