"""
Do the tests find each mistake? Edits one place of the loader at a time, and runs them.

    python -m dev.mutants              # all
    python -m dev.mutants verdict      # those with this in their name

Each mutant is (name, text, its replacement). The text must occur exactly once in dataloader.py and
tokenizer.py together, so whoever changes these files also changes their mutants. Prints a line for
each mutant, killed or SURVIVED, and the number of survivors, which is also the exit code. The
trade-off: tests that killed earlier mutants run first. This saves most of the time, but the test
that a line names depends on the order.
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
EDITED = {name: (ROOT / name).read_text() for name in ("dataloader.py", "tokenizer.py")}
OTHERS = ["dataset.py", "test_dataloader.py"]

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
     "free, row = rows.pop(i)\n        row.append(span)",
     "free, row = rows.pop()\n        row.append(span)"),
    ("smallest piece first",
     "spans.sort(key=size_in_row, reverse=True)",
     "spans.sort(key=size_in_row)"),
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
     "        if start:\n            spans.append((d, 0, 1))\n",
     ""),

    # The line of documents
    ("no epoch in the key of the row groups",
     "permutation(len(groups), self.seed, ROW_GROUPS, epoch)",
     "permutation(len(groups), self.seed, ROW_GROUPS)"),
    ("no epoch in the key of documents",
     "self.seed, DOCUMENTS, epoch, group)",
     "self.seed, DOCUMENTS, group)"),
    ("no group in the key of documents",
     "self.seed, DOCUMENTS, epoch, group)",
     "self.seed, DOCUMENTS, epoch)"),
    ("keys of documents and row groups may be equal",
     "self.seed, DOCUMENTS, epoch, group)",
     "self.seed, ROW_GROUPS, epoch, group)"),
    ("keys of documents and rows may be equal",
     "self.seed, DOCUMENTS, epoch, group)",
     "self.seed, ROWS, epoch, group)"),
    ("keys end with the purpose",
     "np.random.PCG64((*key, seed))",
     "np.random.PCG64((seed, *key))"),
    ("file order: lanes one after the other",
     "place = k * self.num_lanes + segment",
     "place = segment * self.chunks_per_lane + k"),
    ("shuffled order: lanes in turns",
     "place = segment * self.chunks_per_lane + k",
     "place = k * self.num_lanes + segment"),
    ("lanes have the same part of each epoch",
     "segment = (lane + epochs_before) % self.num_lanes",
     "segment = lane"),
    ("epochs are counted from 0",
     "epoch = 1 + epochs_before",
     "epoch = epochs_before"),
    ("a chunk begins in the middle of a document",
     "indices = indices[(start <= starts) & (starts < stop)]",
     "indices = indices[(start < starts) & (starts <= stop)]"),
    ("fewer chunks",
     "max(1, round(self.n_bytes / num_lanes / chunk_bytes))",
     "max(1, int(self.n_bytes / num_lanes / chunk_bytes))"),
    ("one epoch more",
     "else epochs * self.chunks_per_lane\n",
     "else epochs * self.chunks_per_lane + 1\n"),
    ("the line is that of the first epoch",
     "order, ends = self.line_of(epoch)",
     "order, ends = self.line_of(1)"),
    # Documents to ids
    ("transform: the epoch is 1",
     "result = self.transform(ids.astype(np.int64), location, epoch)",
     "result = self.transform(ids.astype(np.int64), location, 1)"),
    ("transform gets the tokenizer's dtype",
     "result = self.transform(ids.astype(np.int64), location, epoch)",
     "result = self.transform(ids, location, epoch)"),
    ("BOS of a transform is not checked",
     "if np.isin(firsts, (self.bos, ~self.bos)).all():",
     "if True:"),
    ("ids of a transform are not checked",
     "if is_list and -n <= ids.min() and ids.max() < n:",
     "if is_list:"),
    ("a document that fails is not named",
     "                raise error_at(location, error) from error\n",
     "                raise\n"),
    ("a document that a transform fails at is not named",
     "            return self._as_tokens(np.asarray(result))\n"
     "        except Exception as error:\n"
     "            raise error_at(location, error) from error\n",
     "            return self._as_tokens(np.asarray(result))\n"
     "        except Exception as error:\n"
     "            raise\n"),
    ("ids of a transform are not copied",
     "ids = ids.astype(np.int32)",
     "ids = ids.astype(np.int32, copy=False)"),
    ("ids of a vocabulary of 32,769 tokens are int16",
     "self.encoder.vocab_size <= 1 << 15",
     "self.encoder.vocab_size <= 1 + (1 << 15)"),
    ("fields of a transform are not copied",
     "tokens = result.astype([*types.items()])",
     "tokens = result.astype([*types.items()], copy=False)"),
    ("an error that is ours becomes another one",
     "    if isinstance(error, UserError):\n"
     "        return UserError",
     "    if False:\n"
     "        return UserError"),
    ("a bug becomes an error of ours",
     "    if isinstance(error, UserError):\n"
     "        return UserError",
     "    if True:\n"
     "        return UserError"),
    ("token shards: half tokens",
     "if (bounds % dtype.itemsize).any():",
     "if False:"),
    ("the end of the program is not seen",
     "if threading._SHUTTING_DOWN:",
     "if False:"),

    # Chunks
    ("rows are not shuffled",
     "rows = [rows[i] for i in order]",
     "pass"),
    ("no lane and chunk in the key of rows",
     "permutation(len(rows), self.seed, ROWS, lane, n)",
     "permutation(len(rows), self.seed, ROWS)"),
    ("no chunk in the key of rows",
     "permutation(len(rows), self.seed, ROWS, lane, n)",
     "permutation(len(rows), self.seed, ROWS, lane)"),
    ("rows in the order of the packing",
     "            rows.sort(key=lambda row: min(row)[0])\n",
     ""),
    ("a failed chunk is kept",
     "        self.futures.clear()\n",
     ""),
    ("chunks are never dropped",
     "        self.futures.pop((lane, source.name, n - 1), None)\n",
     ""),
    ("an ended source stays in memory",
     "        self.futures.pop((lane, source.name, n - 1), None)\n"
     "        if n >= source.n_chunks:\n"
     "            return None\n",
     "        if n >= source.n_chunks:\n"
     "            return None\n"
     "        self.futures.pop((lane, source.name, n - 1), None)\n"),
    ("nulls are not counted",
     "n_null += sum(ids is None for ids in encoded)",
     "pass"),
    ("filtered documents are not counted",
     '"filtered_documents": n_all - n_null - len(documents)}',
     '"filtered_documents": 0}'),
    ("addresses do not leave out filtered documents",
     "kept_parts.append(part._replace(indices=indices[is_kept]))",
     "kept_parts.append(part)"),
    ("the address of a part's first document",
     "if document < len(part.indices):",
     "if document <= len(part.indices):"),
    ("other fields are not seen",
     "        if tokens.dtype != self.dtype:\n",
     "        if False:\n"),
    ("offset is 0",
     "offset += stop - start",
     "pass"),
    ("the epoch of pieces is one more",
     "Piece(location, self.chunk.epoch, start",
     "Piece(location, self.chunk.epoch + 1, start"),
    ("the counts of a chunk come with each of its rows",
     "            if i == 0:\n                for what",
     "            if True:\n                for what"),
    ("chunks without a row are not counted",
     "            if i == 0:\n                for what",
     "            if i == 0 and chunk.spans:\n                for what"),
    ("rows of other ranks are counted",
     "counts if is_own else collections.Counter()",
     "counts"),

    # Mixtures
    ("1/8 for the golden ratio",
     "GOLDEN = 0x9E3779B97F4A7C15",
     "GOLDEN = 1 << 61"),
    ("weights are ignored",
     "            values[name] = value\n",
     "            values[name] = 1.0\n"),
    ("a weight's function gets row 0",
     "float(weight(g)) if callable(weight)",
     "float(weight(0)) if callable(weight)"),
    ("a number may be 0 or less",
     "if not is_number and not callable(weight):",
     "if False:"),
    ("a weight may be nan",
     "if not 0 <= value < math.inf:",
     "if value < 0 or value == math.inf:"),
    ("a source in its border has the row",
     "bisect_right(ends[:-1], point)",
     "bisect_left(ends[:-1], point)"),
    ("the chosen source is that of sorted names",
     "return list(values)[bisect",
     "return sorted(values)[bisect"),
    ("sources in the order of data_dir",
     "        sources.sort(key=lambda source: source.fingerprint)\n",
     ""),
    ("sources in the order of their names",
     "sources.sort(key=lambda source: source.fingerprint)",
     "sources.sort(key=lambda source: source.name)"),
    ("an ended source keeps its part",
     "if n < source.n_chunks:",
     "if True:"),
    ("a source that ends leaves a gap",
     "                del weights[name]    # it has",
     "                break    # it has"),
    ("a weight may be infinite",
     "if not 0 <= value < math.inf:",
     "if not 0 <= value:"),
    ("a source of weight 0 may be chosen",
     "        if value > 0:\n"
     "            values",
     "        if True:\n"
     "            values"),

    # The next batch
    ("no other lane takes over",
     "n_lanes = self.num_lanes if may_go_on else 1",
     "n_lanes = 1"),
    ("no lane takes over from one whose weights are 0",
     "may_go_on = self._knows_all_lanes() or (self._is_finite and not is_distributed())",
     "may_go_on = self._is_finite and not is_distributed()"),
    ("a rank alone does not take over in its own lanes",
     "may_go_on = self._knows_all_lanes() or (self._is_finite and not is_distributed())",
     "may_go_on = self._knows_all_lanes()"),
    ("a rank takes over before it knows all lanes",
     "may_go_on = self._knows_all_lanes() or (self._is_finite and not is_distributed())",
     "may_go_on = True"),
    ("weights of 0 are an error before ranks have agreed",
     "        if weightless and not self._will_exchange():\n",
     "        if weights_of_0:\n"),
    ("an ended run does not begin again",
     "if self._finished:    # start the run again, like any iterable",
     "if False:"),
    ("each iteration begins again",
     "if self._finished:    # start the run again, like any iterable",
     "if True:"),
    ("drop_last is ignored",
     "(self.drop_last and not all(found))",
     "False"),
    ("drop_last always",
     "(self.drop_last and not all(found))",
     "not all(rows.values())"),
    ("an empty run is no error",
     "if loader.rows_delivered == 0 and loader._knows_all_lanes():",
     "if False:"),
    ("a run that has ended is an empty one",
     "if loader.rows_delivered == 0 and loader._knows_all_lanes():",
     "if loader._knows_all_lanes():"),
    ("no limit of chunks without a token",
     "if n_empty > 100 + 3 * source.chunks_per_lane:",
     "if n_empty > 10**4:"),
    ("too low a limit of chunks without a token",
     "if n_empty > 100 + 3 * source.chunks_per_lane:",
     "if n_empty > 1:"),
    ("chunks without a document count as empty",
     "if has_documents and not chunk.spans:",
     "if not chunk.spans:"),
    ("rank r has the r-th rows of a batch",
     "first = start + (self.rank - start) % self._step()",
     "first = start + self.rank % self._step()"),
    ("progress before the batch",
     "            drawn, found = self._draw()\n"
     "            batch = self._batch(drawn.batch)\n",
     "            drawn, found = self._draw()\n"
     "            self._progress = self._progress._replace(positions=drawn.positions)\n"
     "            batch = self._batch(drawn.batch)\n"),
    ("drawing moves the loader's positions",
     "positions, counts = progress.positions.copy(), progress",
     "positions, counts = progress.positions, progress"),
    ("counts are those of the loader",
     "progress.positions.copy(), progress.counts.copy()",
     "progress.positions.copy(), progress.counts"),
    ("stats: an epoch more at the end",
     "n = min(n, source.n_chunks - 1)",
     "n = min(n, source.n_chunks)"),
    ("threads may share a step",
     "        with self._lock:\n            if self._finished:",
     "        with contextlib.nullcontext():\n            if self._finished:"),

    # Masks and fields
    ("the end of a short row is not masked",
     "ids_of(blank)[:] = ~self.encoder.bos",
     "ids_of(blank)[:] = self.encoder.bos"),
    ("a missing row is not masked",
     "row.chunk.ids[row.i] if row else blank",
     "row.chunk.ids[row.i] if row else np.zeros_like(blank)"),
    ("a missing row has no fields",
     "self._maker.blank_row(self._maker.dtype or np.int32)",
     "self._maker.blank_row(np.int32)"),
    ("inputs are not BOS at the end of a short row",
     "ids_of(blank)[:] = ~self.encoder.bos",
     "ids_of(blank)[:] = ~0"),
    ("masked inputs are 0",
     "np.maximum(ids, ~ids)",
     "np.maximum(ids, 0)"),
    ("masked targets are not -100",
     "        targets[targets < 0] = -100\n",
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
     "                torch.from_numpy(np.zeros(1, types[name]))",
     "                pass"),

    # The end of a finite run
    ("ranks do not agree",
     "if self._will_exchange() and self._exchange_positions(found):",
     "if False:"),
    ("the ranks of an endless run agree, too",
     "return self._is_finite and not self",
     "return not self"),
    ("ranks agree again in each batch",
     "self._is_finite and not self._knows_all_lanes() and is",
     "self._is_finite and is"),
    ("each rank has its own verdict",
     "if not any(gather(not all(found), self.group)):",
     "if not any([not all(found), gather(0, self.group) is None]):"),
    ("an error may come after the ranks have agreed",
     "            batch = self._batch(drawn.batch)\n"
     "            # Here the ranks meet, when all that may fail on one of them is done.\n"
     "            if self._will_exchange() and self._exchange_positions(found):\n",
     "            has_ended = self._will_exchange() and self._exchange_positions(found)\n"
     "            batch = self._batch(drawn.batch)\n"
     "            if has_ended:\n"),
    ("the ranks agree only once",
     "if self._asked_at == self.rows_delivered:",
     "if self._asked_at is not None:"),
    ("an interrupt while ranks agree is forgotten",
     "if self._asked_at == self.rows_delivered:",
     "if False:"),
    ("a load does not end what ranks agree on",
     "        self._asked_at = None\n",
     "        self._asked_at = getattr(self, '_asked_at', None)\n"),
    ("the ranks learn only their own lanes",
     "self._positions_at(state, range(self.num_lanes))",
     "self._positions_at(state, self._own_lanes(self.num_lanes))"),
    ("gather_states on all ranks",
     "return merge_states(states) if dist.get_rank(loader.group) == 0 else None",
     "return merge_states(states)"),

    # States
    ("the row of the run is not restored",
     'self._go_to(state["rows"], positions)',
     "self._go_to(0, positions)"),
    ("the T of a state is not checked",
     '        check_int("T", state["T"])\n',
     ""),
    ("a position beyond its chunk is the next chunk",
     "    if i > len(chunk.spans):\n",
     "    if False:\n"),
    ("a position at the end of its chunk is an error",
     "    if i > len(chunk.spans):\n",
     "    if i >= len(chunk.spans):\n"),
    ("lanes of a rank depend on the row",
     "        positions = self._first_positions(lanes)\n",
     '        first = (self.rank + state["rows"]) % self.world_size\n'
     "        lanes = range(first, lanes.stop, self.world_size)\n"
     "        positions = self._first_positions(lanes)\n"),
    ("num_lanes of the state is ignored",
     'for name in ("num_lanes", "chunk_bytes"):    # from',
     'for name in ("chunk_bytes",):    # from'),
    ("chunk_bytes of the state is ignored",
     'for name in ("num_lanes", "chunk_bytes"):    # from',
     'for name in ("num_lanes",):    # from'),
    ("sources are not opened again at a load",
     "self.num_lanes, self.chunk_bytes, self.sources = num_lanes, chunk_bytes, sources",
     "self.num_lanes, self.chunk_bytes = num_lanes, chunk_bytes"),
    ("old chunks are used after a load",
     "            self._maker.clear()\n"
     "            self.num_lanes",
     "            self.num_lanes"),
    ("the seed is not compared",
     '"shuffle_seed": self.shuffle_seed, ',
     ""),
    ("the transform is not compared",
     '"transform": name_of(self.transform)}',
     "}"),
    ("the tokenizer is not compared",
     '"tokenizer": self.encoder.fingerprint,',
     ""),
    ("the split is not compared",
     '"split": self.split, ',
     ""),
    ("a change of packing is not seen",
     '(state["T"], state["packing"]) == (self.T, self.packing)',
     'state["T"] == self.T'),
    ("a change of T is not seen",
     '(state["T"], state["packing"]) == (self.T, self.packing)',
     'state["packing"] == self.packing'),
    ("another T skips whole chunks, too",
     "if i > 0 and not is_same_packing:",
     "if not is_same_packing:"),
    ("another T repeats the chunk",
     "n, i = n + 1, 0\n"
     "                positions",
     "n, i = n, 0\n"
     "                positions"),
    ("moved folders are not found",
     "if fingerprint in state[\"sources\"]:",
     "if any(saved[\"name\"] == name for saved in state[\"sources\"].values()):"),
    ("folders of equal data take one place",
     "if len({source.fingerprint for source in sources}) < len(sources):",
     "if False:"),
    ("changed folders are not seen",
     "if source not in known and (name in theirs or not known):",
     "if source not in known and not known:"),
    ("data of the same sizes is the same data",
     "shard.text_bytes, shard.group_sizes, shard.digest]",
     "shard.text_bytes, shard.group_sizes]"),
    ("a state of no source fits",
     "if source not in known and (name in theirs or not known):",
     "if source not in known and name in theirs:"),
    ("a change of T or the packing is not said",
     "        if was != is_now:\n",
     "        if was != is_now and key in sources:\n"),
    ("no warning of other weights",
     "        if was != is_now:\n",
     "        if was != is_now and (key not in sources or key in before.keys() ^ now.keys()):\n"),
    ("no warning of new sources",
     "{**before[\"sources\"], **now[\"sources\"]}.items()",
     "before[\"sources\"].items()"),
    ("no warning of sources that are gone",
     "{**before[\"sources\"], **now[\"sources\"]}.items()",
     "now[\"sources\"].items()"),
    ("Ctrl-C is an error of a document",
     "        except KeyboardInterrupt:\n"
     "            raise\n"
     "        except BaseException as error:    # tiktoken's",
     "        except BaseException as error:    # tiktoken's"),
    ("all weights may be 0",
     "        if weightless and not self._will_exchange():\n",
     "        if False:\n"),
    ("merge: steps are not compared",
     "state.get(key) != merged.get(key)",
     "False"),
    ("merge: lanes may lack",
     '        check_has_lanes(merged, range(merged["config"]["num_lanes"]))\n',
     ""),
    ("load: lanes may lack",
     "        check_has_lanes(state, lanes)\n",
     ""),
    ("older versions are read",
     'if state["version"] != VERSION:',
     'if state["version"] is None:'),
    ("another version",
     "VERSION = 11 ",
     "VERSION = 12 "),
    ("a state that lacks a key is a KeyError",
     "    except Exception as error:\n"
     "        raise UserError(\n"
     '            f"expected a loader state',
     "    except (TypeError, AttributeError, IndexError) as error:\n"
     "        raise UserError(\n"
     '            f"expected a loader state'),

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
     "        self._maker.workers.shutdown(wait=False)\n        self._maker.clear()\n",
     ""),
    ("token shards with another tokenizer",
     "                check_same_tokenizer(shard, self.fingerprint)\n",
     "                pass\n"),
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

# Tests of other files are left out. The slow ones run after all others have passed.
LEFT_OUT = "train_gives or tiktoken or conversations or checksum or index"
SLOW = "never_change or drawn_runs or ctrl_c or program_ends or real_ranks"
KILLERS = collections.Counter()    # how many mutants each test has killed

def try_mutant(mutant, limit):
    """A line that says whether the tests kill it. limit: seconds for each test, or 0."""
    name, before, after = mutant
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        for file in OTHERS:
            shutil.copy(ROOT / file, folder)
        for file, text in EDITED.items():
            Path(folder, file).write_text(text.replace(before, after))
        verdict = run_suite(folder, limit)
    return f"{verdict}: {name} ({time.time() - began:.0f} s)"

def count(text):
    return sum(of_file.count(text) for of_file in EDITED.values())

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
    for selection in (f"not ({LEFT_OUT}) and not ({SLOW})", SLOW):
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
    outdated = [name for name, before, _ in chosen if count(before) != 1]
    if outdated:
        sys.exit("the text of these mutants does not occur exactly once; edit dev/mutants.py:\n"
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
