"""
Does the suite find each mistake? Changes one place of dataloader.py at a time and runs the tests.

    python -m dev.mutants              # all
    python -m dev.mutants verdict      # those with this in their name

Each mutant is (name, text, its replacement). The text must be in dataloader.py exactly once: when
the loader changes, its mutants change with it. Prints a line for each, killed or SURVIVED, and how
many survived, which is also the exit code. The trade-off: tests that found earlier mutants run
first, which saves most of the time, so the test that is named depends on the order.
"""

import collections
import contextlib
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

# Imported once, here, for all: each mutant's process is a fork, which saves it some five seconds.
import hypothesis  # noqa: F401
import pyarrow  # noqa: F401
import pytest
import torch  # noqa: F401

ROOT = Path(__file__).resolve().parent.parent
LOADER = (ROOT / "dataloader.py").read_text()
FILES = ["dataset.py", "tokenizer.py", "test_dataloader.py"]

MUTANTS = [
    # Packings
    ("flat does not repeat the last token",
     "row, free = [(d, stop - 1, stop)], R - 1",
     "row, free = [], R"),
    ("flat: a last row of one repeated token",
     "if free < R - 1 or not rows:",
     "if free < R or not rows:"),
    ("flat: no row for a lone BOS",
     "if free < R - 1 or not rows:",
     "if free < R - 1:"),
    ("bestfit crops the longest",
     "shortest, _ = left[0]",
     "shortest, _ = left[-1]"),
    ("bestfit: of equal documents the last",
     "left = sorted((n, -d) for d, n",
     "left = sorted((n, d) for d, n"),
    ("bestfit: of the shortest the last",
     "i = bisect_right(left, (shortest, 0)) - 1",
     "i = 0"),
    ("a looser best fit",
     "i = bisect_left(rows, (size,))",
     "i = bisect_left(rows, (size + 1,))"),
    ("worst fit",
     "free, row = rows.pop(i)\n        row.append(piece)",
     "free, row = rows.pop()\n        row.append(piece)"),
    ("smallest piece first",
     "pieces.sort(key=size_in_row, reverse=True)",
     "pieces.sort(key=size_in_row)"),
    ("exactfit: threshold R / 2",
     "(R // 32 + 1,)",
     "(R // 2 + 1,)"),
    ("exactfit: threshold 0",
     "(R // 32 + 1,)",
     "(1,)"),
    ("exactfit fills a gap of one",
     "while free > 1 and",
     "while free > 0 and"),
    ("exactfit leaves a gap of two",
     "while free > 1 and",
     "while free > 2 and"),
    ("exactfit takes the fullest row apart",
     "_, emptiest = short[-1]",
     "_, emptiest = short[0]"),
    ("exactfit fills the emptiest row first",
     "free, row = short.popleft()",
     "free, row = short.pop()"),
    ("exactfit: no room for BOS again",
     "room = free - 1 if start else free",
     "room = free"),
    ("size of a piece without BOS again",
     "return stop - start + 1 if start else stop - start",
     "return stop - start"),
    ("BOS is not repeated",
     "        if start:\n            pieces.append((d, 0, 1))\n",
     ""),

    # The line of documents
    ("no epoch in the key of the row groups",
     "shuffled(len(groups), self.seed, 0, epoch)",
     "shuffled(len(groups), self.seed, 0)"),
    ("no epoch in the key of documents",
     "self.seed, 1, epoch, group)",
     "self.seed, 1, group)"),
    ("no group in the key of documents",
     "self.seed, 1, epoch, group)",
     "self.seed, 1, epoch)"),
    ("keys of documents and row groups may be equal",
     "self.seed, 1, epoch, group)",
     "self.seed, 0, epoch, group)"),
    ("keys of documents and rows may be equal",
     "self.seed, 1, epoch, group)",
     "self.seed, 2, epoch, group)"),
    ("keys end with the purpose",
     "np.random.PCG64((*key, seed))",
     "np.random.PCG64((seed, *key))"),
    ("file order: lanes one after the other",
     "chunk = k * self.num_lanes + segment",
     "chunk = segment * self.chunks_per_lane + k"),
    ("shuffled order: lanes in turns",
     "chunk = segment * self.chunks_per_lane + k",
     "chunk = k * self.num_lanes + segment"),
    ("lanes have the same part of each epoch",
     "segment = (lane + epochs_before) % self.num_lanes",
     "segment = lane"),
    ("epochs are counted from 0",
     "epoch = 1 + epochs_before",
     "epoch = epochs_before"),
    ("a chunk begins in the middle of a document",
     "indices = indices[(start <= at) & (at < stop)]",
     "indices = indices[(start < at) & (at <= stop)]"),
    ("fewer chunks",
     "max(1, round(self.n_bytes / num_lanes / chunk_bytes))",
     "max(1, int(self.n_bytes / num_lanes / chunk_bytes))"),
    ("one epoch more",
     "else epochs * self.chunks_per_lane\n",
     "else epochs * self.chunks_per_lane + 1\n"),
    ("the line is that of the first epoch",
     "order, begins, ends = self.line(epoch)",
     "order, begins, ends = self.line(1)"),
    # Documents to ids
    ("transform: the epoch is 1",
     "result = self.transform(ids.astype(np.int64), location, epoch)",
     "result = self.transform(ids.astype(np.int64), location, 1)"),
    ("transform gets the tokenizer's dtype",
     "result = self.transform(ids.astype(np.int64), location, epoch)",
     "result = self.transform(ids, location, epoch)"),
    ("BOS of a transform is not checked",
     "or ids[0] not in (bos, ~bos) or",
     "or"),
    ("ids of a transform are not checked",
     "-n_tokens <= ids.min() <= ids.max() < n_tokens):",
     "True):"),
    ("a document that fails is not named",
     "                    self.encode(alone, array, epoch)\n",
     "                    pass\n"),
    ("an error that is ours becomes another one",
     "            if isinstance(error, UserError):\n                raise",
     "            if False:\n                raise"),
    ("a bug becomes an error of ours",
     "            if isinstance(error, UserError):\n                raise",
     "            if True:\n                raise"),
    ("token shards: half tokens",
     "if (np.diff(offsets) % dtype.itemsize).any():",
     "if False:"),
    ("the end of the program is not seen",
     "if threading._SHUTTING_DOWN:",
     "if False:"),

    # Chunks
    ("rows are not shuffled",
     "rows = [rows[i] for i in order]",
     "pass"),
    ("no lane and chunk in the key of rows",
     "shuffled(len(rows), self.seed, 2, lane, n)",
     "shuffled(len(rows), self.seed, 2)"),
    ("no chunk in the key of rows",
     "shuffled(len(rows), self.seed, 2, lane, n)",
     "shuffled(len(rows), self.seed, 2, lane)"),
    ("rows in the order of the packing",
     "            rows.sort(key=first_document)\n",
     ""),
    ("a failed read is kept",
     "        self.reads.clear()\n",
     ""),
    ("a failed chunk is kept",
     "        self.futures.clear()\n",
     ""),
    ("chunks are never forgotten",
     "            self._maker.forget(source, lane, n)\n",
     ""),
    ("nulls are not counted",
     "n_null += 1",
     "pass"),
    ("filtered documents are not counted",
     "n_filtered += 1",
     "pass"),
    ("other fields are not seen",
     "        if result.dtype != self.dtype:\n",
     "        if False:\n"),
    ("offset is 0",
     "offset += stop - start",
     "pass"),
    ("the epoch of pieces is one more",
     "Piece(location, self.chunk.epoch, start",
     "Piece(location, self.chunk.epoch + 1, start"),
    ("documents count in each of their rows",
     "counts.append(len(seen) - n_before)",
     "counts.append(len(row))"),

    # Mixtures
    ("1/8 for the golden ratio",
     "GOLDEN = 0x9E3779B97F4A7C15",
     "GOLDEN = 1 << 61"),
    ("weights are ignored",
     "values = [float(weight(g) if callable(weight) else weight) for",
     "values = [1.0 for"),
    ("a weight's function gets row 0",
     "weight(g) if callable(weight)",
     "weight(0) if callable(weight)"),
    ("a number may be 0 or less",
     "if not is_number and not callable(weight):",
     "if False:"),
    ("a weight may be nan",
     "if not (min(values) >= 0 and 0 < ends[-1] < math.inf):",
     "if min(values) < 0 or ends[-1] == 0:"),
    ("a source in its border has the row",
     "bisect_right(ends[:-1], point)",
     "bisect_left(ends[:-1], point)"),
    ("the chosen source is that of sorted names",
     "return list(weights)[bisect",
     "return sorted(weights)[bisect"),
    ("sources in the order of data_dir",
     "        sources.sort(key=lambda source: source.fingerprint)\n",
     ""),
    ("sources in the order of their names",
     "sources.sort(key=lambda source: source.fingerprint)",
     "sources.sort(key=lambda source: source.name)"),
    ("an ended source keeps its part",
     "if n < source.n_chunks:\n                weights",
     "if True:\n                weights"),
    ("a source that ends leaves a gap",
     "                del weights[name]    # it ends",
     "                return None    # it ends"),

    # The next batch
    ("no other lane takes over",
     "for k in range(self.num_lanes):",
     "for k in range(1):"),
    ("an ended run does not begin again",
     "if self._finished:    # start the run again, like any iterable",
     "if False:"),
    ("each iteration begins again",
     "if self._finished:    # start the run again, like any iterable",
     "if True:"),
    ("drop_last is ignored",
     "(self.drop_last and not all(rows.values()))",
     "False"),
    ("drop_last always",
     "(self.drop_last and not all(rows.values()))",
     "not all(rows.values())"),
    ("an empty run is no error",
     "if loader.g == 0 and loader._knows_all_lanes():",
     "if False:"),
    ("a run that has ended is an empty one",
     "if loader.g == 0 and loader._knows_all_lanes():",
     "if loader._knows_all_lanes():"),
    ("no limit of chunks without a token",
     "if n_without > 100 + 3 * source.chunks_per_lane:",
     "if n_without > 10**4:"),
    ("too low a limit of chunks without a token",
     "if n_without > 100 + 3 * source.chunks_per_lane:",
     "if n_without > 1:"),
    ("chunks without a document count as empty",
     "if not chunk.rows and chunk.n_null + chunk.n_filtered:",
     "if not chunk.rows:"),
    ("rank r has the r-th rows of a batch",
     "first = (self.rank - self.g) % self.world_size",
     "first = self.rank"),
    ("progress before the batch",
     "                batch = self._batch(own)\n",
     "                self._progress = self._progress._replace(places=places)\n"
     "                batch = self._batch(own)\n"),
    ("progress in two steps",
     "            self._progress = Progress(g, places, counts, own)",
     "            self._progress = self._progress._replace(counts=counts)\n"
     "            self._progress = Progress(g, places, counts, own)"),
    ("drawing moves the loader's places",
     "places = self._progress.places.copy()",
     "places = self._progress.places"),
    ("counts are those of the loader",
     "counts = self._progress.counts.copy()",
     "counts = self._progress.counts"),
    ("nulls count with each row",
     "            if i == 0:\n",
     "            if True:\n"),
    ("stats: an epoch more at the end",
     "n = min(n, source.n_chunks - 1)",
     "pass"),
    ("threads may share a step",
     "        with self._lock:\n            if self._finished:",
     "        with contextlib.nullcontext():\n            if self._finished:"),

    # Masks and fields
    ("the end of a row has a loss",
     "targets[b, max(0, n_tokens - 1):] = -100",
     "targets[b, max(0, n_tokens - 1):] = self.tokenizer.bos"),
    ("the target after the last token has a loss",
     "max(0, n_tokens - 1)",
     "n_tokens"),
    ("the last target of a row has no loss",
     "max(0, n_tokens - 1)",
     "max(0, n_tokens - 2)"),
    ("a row that is all masked has losses",
     "max(0, n_tokens - 1)",
     "n_tokens - 1"),
    ("inputs are not BOS at the end of a row",
     "inputs[b, n_tokens:] = self.tokenizer.bos",
     "inputs[b, n_tokens:] = 0"),
    ("inputs without a loss are 0",
     "np.maximum(inputs, ~inputs)",
     "np.maximum(inputs, 0)"),
    ("tokens without a loss are not -100",
     "            targets[targets < 0] = -100\n",
     ""),
    ("fields are not shifted",
     "field = tokens[name][:, 1:].copy()",
     "field = tokens[name][:, :-1].copy()"),
    ("fields are not 0 where a target is -100",
     "                field[targets < 0] = 0\n",
     ""),
    ("fields become int64",
     "field = tokens[name][:, 1:].copy()",
     "field = tokens[name][:, 1:].astype(np.int64)"),
    ("batches share memory",
     "batch = [inputs, targets]",
     "batch = [self.__dict__.setdefault('_kept', inputs), targets]"),

    ("each worker of a DataLoader has all rows",
     "if get_worker_info() is not None:",
     "if False:"),
    ("fields of texts",
     'kind not in "iufb"',
     'kind not in "iufbU"'),

    # The end of a finite run
    ("ranks do not agree",
     "if not is_finite or not is_distributed() or self._knows_all_lanes():",
     "if True:"),
    ("each rank has its own verdict",
     "if not any(gather(has_ended, self.group)):",
     "if not any([has_ended, gather(0, self.group) is None]):"),
    ("an error may come after the ranks have agreed",
     "                batch = self._batch(own)\n"
     "                if not self._learn_all_lanes(places):",
     "                learned = self._learn_all_lanes(places)\n"
     "                batch = self._batch(own)\n"
     "                if not learned:"),
    ("the ranks agree only once",
     "if self._asked_at == self.g:",
     "if self._asked_at is not None:"),
    ("an interrupt while ranks agree is forgotten",
     "if self._asked_at == self.g:",
     "if False:"),
    ("a load does not end what ranks agree on",
     "        self._asked_at = None    # g when",
     "        self._asked_at = getattr(self, '_asked_at', None)    # g when"),
    ("places of the last rank only",
     "            merged |= places_of_rank\n",
     "            merged = places_of_rank\n"),
    ("gather_states on all ranks",
     "return merge_states(states) if dist.get_rank(loader.group) == 0 else None",
     "return merge_states(states)"),

    # States
    ("the row of the run is not restored",
     "self._go_to(g, places)",
     "self._go_to(0, places)"),
    ("lanes of a rank depend on the row",
     "        places = self._first_places(num_lanes)\n"
     "        check_has",
     '        first = (self.rank + state["rows"]) % self.world_size\n'
     "        lanes = range(first, num_lanes, self.world_size)\n"
     "        places = dict.fromkeys(itertools.product(lanes, self.sources), (0, 0))\n"
     "        check_has"),
    ("num_lanes of the state is ignored",
     "for name in (\"num_lanes\", \"chunk_bytes\"):    # as",
     "for name in (\"chunk_bytes\",):    # as"),
    ("chunk_bytes of the state is ignored",
     "for name in (\"num_lanes\", \"chunk_bytes\"):    # as",
     "for name in (\"num_lanes\",):    # as"),
    ("sources are not opened again at a load",
     "self.num_lanes, self.chunk_bytes, self.sources = num_lanes, chunk_bytes, sources",
     "self.num_lanes, self.chunk_bytes = num_lanes, chunk_bytes"),
    ("old chunks are used after a load",
     "            self._maker.clear()\n"
     "            self.num_lanes",
     "            self.num_lanes"),
    ("the seed is not compared",
     '"shuffle_seed": loader.shuffle_seed, ',
     ""),
    ("the transform is not compared",
     '"transform": name_of(loader.transform)}',
     "}"),
    ("the tokenizer is not compared",
     '"tokenizer": loader.tokenizer.fingerprint(),',
     ""),
    ("the split is not compared",
     '"split": loader.split, ',
     ""),
    ("a change of packing is not seen",
     ' and state["packing"] == self.packing',
     ""),
    ("a change of T is not seen",
     'state["T"] == self.T and ',
     ""),
    ("another T skips whole chunks, too",
     "if i > 0 and not same_rows:",
     "if not same_rows:"),
    ("another T repeats the chunk",
     "n, i = n + 1, 0\n                places",
     "n, i = n, 0\n                places"),
    ("moved folders are not found",
     "if fingerprint in state[\"sources\"]:",
     "if any(saved[\"name\"] == name for saved in state[\"sources\"].values()):"),
    ("folders of equal data take one place",
     "if len({source.fingerprint for source in sources}) < len(sources):",
     "if False:"),
    ("row groups are kept after the end",
     "                self._maker.clear()\n                self._finished",
     "                self._finished"),
    ("changed folders are not seen",
     "        if source.name in hashes:\n",
     "        if False:\n"),
    ("a state of no source fits",
     "    if len(new) == len(sources):\n",
     "    if False:\n"),
    ("another shard is the first that differs",
     "if our != their]",
     "]"),
    ("a change of T or the packing is not said",
     "    changes += [(what, before[what], now[what]) for what in (\"T\", \"packing\")]\n",
     ""),
    ("no warning of other weights",
     "was[\"weight\"], is_now[\"weight\"]",
     "0, 0"),
    ("no warning of new sources",
     "{**before[\"sources\"], **now[\"sources\"]}.items()",
     "before[\"sources\"].items()"),
    ("no warning of sources that are gone",
     "{**before[\"sources\"], **now[\"sources\"]}.items()",
     "now[\"sources\"].items()"),
    ("no warning of other code",
     "[(\"the code of transform\", before[\"code\"], now[\"code\"])]",
     "[]"),
    ("code is read again at each state",
     '"packing": self.packing, "code": self.code,',
     '"packing": self.packing, "code": hash_of_code(self.transform),'),
    ("weights are read again at each state",
     '"weight": self.described[name]}',
     '"weight": describe(self.weights[name])}'),
    ("Ctrl-C is an error of a document",
     "except (CancelledError, KeyboardInterrupt):",
     "except CancelledError:"),
    ("all weights may be 0",
     "0 < ends[-1] < math.inf",
     "ends[-1] < math.inf"),
    ("functions of weights have only a name",
     'return f"{name_of(weight)} {hash_of_code(weight)}" if callable(weight) else weight',
     "return name_of(weight) if callable(weight) else weight"),
    ("merge: steps are not compared",
     "state[key] != first[key]",
     "False"),
    ("merge: lanes may lack",
     '        check_has_lanes(merged, range(first["config"]["num_lanes"]))\n',
     ""),
    ("load: lanes may lack",
     "        check_has_lanes(state, {lane for lane, _ in places})\n",
     ""),
    ("older versions are read",
     "if version != VERSION:",
     "if version is None:"),
    ("another version",
     "VERSION = 10 ",
     "VERSION = 11 "),
    ("a state that lacks a key is a KeyError",
     "except (KeyError, TypeError, AttributeError, IndexError) as error:",
     "except (TypeError, AttributeError, IndexError) as error:"),

    # Defaults and guards
    ("32 lanes by default",
     "    num_lanes = 64\n",
     "    num_lanes = 32\n"),
    ("default lanes do not know the row groups",
     "bytes_of_lane += n_bytes / n_groups + chunk_bytes",
     "bytes_of_lane += chunk_bytes"),
    ("default lanes do not know other sources",
     "bytes_of_lane += n_bytes / n_groups + chunk_bytes",
     "bytes_of_lane = n_bytes / n_groups + chunk_bytes"),
    ("default lanes do not know the world size",
     "return math.lcm(num_lanes, world_size)",
     "return num_lanes"),
    ("chunks of 128 rows by default",
     "bytes_of_256_rows = 1024 * (T + 1)",
     "bytes_of_256_rows = 512 * (T + 1)"),
    ("smaller chunks by default",
     "2 << 20), 64 << 20)",
     "1 << 20), 64 << 20)"),
    ("a fork is not seen",
     "if os.getpid() != loader._pid:",
     "if False:"),
    ("a closed loader is not seen",
     "if loader._closed:",
     "if False:"),
    ("close stops nothing",
     "        if self._pid == os.getpid():\n"
     "            self._maker.stop()\n",
     ""),
    ("token shards with another tokenizer",
     "        check_maker(source.shards[0], loader.tokenizer)\n",
     "        pass\n"),
    ("a process group made later is not seen",
     "        if seen != now:",
     "        if False:"),
    ("RANK=1 alone",
     '{"RANK": None, ',
     '{"RANK": "1", '),
    ("SLURM_PROCID=1 alone",
     '"SLURM_PROCID": "0",',
     '"SLURM_PROCID": "1",'),
    ("SLURM_STEP_NUM_TASKS=4 alone",
     '"SLURM_STEP_NUM_TASKS": "1",',
     '"SLURM_STEP_NUM_TASKS": "4",'),
    ("given ranks are compared with the launcher's",
     'if loader.given["rank"] is None:',
     "if True:"),
    ("epochs are not checked",
     '            check_int("epochs", n)\n',
     "            pass\n"),
    ("True is an int",
     "if type(value) is not int or value < least:",
     "if not isinstance(value, int) or value < least:"),
]

# Tests of other files are left out. The slow ones run when all others have passed.
OTHERS = "train_gives or tiktoken or conversations or checksum or index"
SLOW = "never_change or drawn_runs or ctrl_c or program_ends or real_ranks"
KILLERS = collections.Counter()    # how many mutants each test has found

def try_mutant(mutant, limit):
    """A line that says whether the suite finds it. limit: of seconds for a test, or 0."""
    name, before, after = mutant
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for file in FILES:
            shutil.copy(ROOT / file, folder)
        Path(folder, "dataloader.py").write_text(LOADER.replace(before, after))
        verdict = run_suite(folder, limit)
    return f"{verdict}: {name} ({time.time() - began:.0f} s)"

def run_suite(folder, limit):
    process = multiprocessing.get_context("fork").Process(target=run_tests, args=(folder, limit))
    process.start()
    process.join()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)    # ranks that it has started
    if process.exitcode == 0:
        return "SURVIVED"
    if process.exitcode == -signal.SIGALRM:
        return "killed by the time limit"
    output = Path(folder, "output").read_text()
    failed = re.search(r"(?:FAILED|ERROR) \S+::(\w+)", output)
    if not failed:
        return "killed by an error"
    KILLERS[failed[1]] += 1
    return f"killed by {failed[1]}"

class Plugin:
    """Of pytest."""
    def __init__(self, limit):
        self.limit = limit

    def pytest_collection_modifyitems(self, items):
        items.sort(key=lambda item: KILLERS[item.originalname], reverse=True)

    def pytest_runtest_setup(self, item):
        signal.alarm(self.limit)    # it ends the process

def run_tests(folder, limit):
    """In a process of its own: exits with 0 if all tests pass."""
    os.setpgid(0, 0)
    os.chdir(folder)
    output = os.open("output", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    arguments = ["-q", "-x", "-p", "no:cacheprovider", "--tb=no", "test_dataloader.py", "-k"]
    for selection in (f"not ({OTHERS}) and not ({SLOW})", SLOW):
        code = pytest.main([*arguments, selection], plugins=[Plugin(limit)])
        sys.stdout.flush()
        if code:
            os._exit(1)
    os._exit(0)

def main():
    part = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in MUTANTS if part in mutant[0]]
    if not chosen:
        sys.exit(f"no mutant has {part!r} in its name")
    outdated = [name for name, before, _ in chosen if LOADER.count(before) != 1]
    if outdated:
        sys.exit("these mutants no longer apply, their text is not in dataloader.py exactly once:\n"
                 + "\n".join(outdated))
    began = time.time()
    as_it_is = try_mutant(("no mutant", "", ""), 0)
    if not as_it_is.startswith("SURVIVED"):
        sys.exit(f"the tests must pass without a mutant, but: {as_it_is}")
    limit = int(time.time() - began)    # for one test what all take together: it hangs
    survived = 0
    # Not in a pool: ranks that are forked by a fork of its thread exit with 1, whatever they did.
    for mutant in chosen:
        line = try_mutant(mutant, limit)
        survived += line.startswith("SURVIVED")
        print(line, flush=True)
    print(f"{len(chosen)} mutants, {survived} survived")
    sys.exit(min(survived, 100))

if __name__ == "__main__":
    main()
