"""Tests of what is timed as overhead, and of the shares that are recorded."""

import json
import types

from absl import flags
from commands import (
  built_once as built_once,
  fresh,
  model as model,
  run_command,
  unread as unread,
)
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import timing, walk_cost
from spec_jax import corpus, sampling, tree as trees
from spec_jax.base import DETERMINISTIC, IID


@pytest.mark.parametrize("law", [DETERMINISTIC, IID])
def test_the_timed_walk_accepts_the_deepest_path(law):
  """All of the first chain, greedy and sampled; a twin leaves it at once."""
  for parents in walk_cost.TREES.values():
    tree = trees.from_parents(parents)
    assert tree.num_nodes == 64
    noise = sampling.no_noise(1, tree.num_nodes, tree.depth)
    draft, logits = walk_cost.accepted_draft(tree, 100, law)
    for settings in walk_cost.SAMPLINGS.values():
      own = walk_cost.sampling_of(settings)
      walk = walk_cost.walk(None, logits, draft, own, noise)
      assert int(walk.num_accepted[0]) == tree.depth
      other = walk_cost.walk(None, -logits, draft, own, noise)
      # The likely token is now the least likely; a sibling may be kept.
      assert other.path[0, 1] != 1


def test_a_piece_times_a_call_and_consumes_nothing():
  """Again and again, on what it was given; idling takes the same arguments."""
  held = jnp.arange(4.0)

  def function(params, x, y):
    return params * x + y

  piece = timing.Piece(function, 2.0, held, (jnp.ones(4),))
  assert all(0 < piece() < 60 for _ in range(3))
  np.testing.assert_array_equal(held, [0, 1, 2, 3])
  np.testing.assert_array_equal(piece.result(), [1, 3, 5, 7])
  assert piece.idle()() > 0
  np.testing.assert_array_equal(piece.idle().result(), held)


def test_a_share_is_without_the_call_and_against_one_pass():
  """1.5 of propose and .1 of update less .1 each, in a pass of 20: 7 %."""
  overheads = fresh("overheads")
  ms = {
    ("slow", "propose"): 1.5,
    ("slow", "propose call"): 0.1,
    ("slow", "update"): 0.1,
    ("slow", "update call"): 0.1,
    ("fast", "propose"): 0.3,
    ("fast", "propose call"): 0.1,
    ("fast", "update"): 0.05,
    ("fast", "update call"): 0.1,
  }
  slow, fast = overheads.drafter_lines(ms, 20.0)
  assert slow["share"] == pytest.approx(0.07) and not slow["met"]
  assert fast["share"] == pytest.approx(0.01) and fast["met"]
  assert fast["update_ms"] == 0 and slow["limit"] == 0.02


def test_a_cost_ratio_is_of_one_pass_of_the_draft():
  """4 ms of passes and .4 for the text, in a pass of 20; a block takes 22."""
  overheads = fresh("overheads")
  names = "distilled layers, chain of 4", "Medusa heads, tree", "the default"
  ms = {}
  for name in names:
    for part, value in (("propose", 4.1), ("update", 0.5)):
      ms |= {(name, part): value, (name, f"{part} call"): 0.1}
  sizes = types.SimpleNamespace(num_nodes=5, depth=7)
  chain, heads, merged = overheads.learned_lines(
    ms, dict.fromkeys(names, sizes), {1: 20.0, 5: 22.0}
  )
  assert chain["cost_ratio"] == pytest.approx(0.2 / 7)
  assert merged["cost_ratio"] == pytest.approx(0.05)  # the head's 4 passes
  assert heads["cost_ratio"] == pytest.approx(0.2)  # all heads at once
  assert chain["share"] == pytest.approx(0.22)
  assert chain["step"] == pytest.approx(1.32)


def test_every_table_drafter_and_walk_is_in_the_file(
  model, tmp_path, monkeypatch, capsys
):
  """Drafters are timed while they propose; shares follow from the times."""
  out = tmp_path / "x.json"
  ran = run_command(
    monkeypatch,
    capsys,
    "overheads",
    f"--model={model}",
    f"--out={out}",
    "--rounds=1",
    "--drafters=prompt_lookup|vanilla|none",
  )
  assert ran.code in (0, None), ran.err
  assert "left out: vanilla: it takes a draft" in ran.err
  record = json.loads(out.read_text())
  names = {x["drafter"] for x in record["drafters"]}
  assert not {"none", "vanilla"} & names
  (lookup,) = [x for x in record["drafters"] if x["drafter"] == "prompt_lookup"]
  assert 1 <= lookup["proposed"] <= 7
  whole = lookup["propose_ms"] + lookup["update_ms"]
  assert lookup["share"] == pytest.approx(whole / lookup["pass_ms"])
  assert len(record["verify"]) == 2 * 2 * 2
  for line in record["verify"]:
    assert line["nodes"] == 64 and line["limit"] == 0.05
    assert line["share"] == pytest.approx(line["verify_ms"] / line["pass_ms"])


def test_a_draft_that_ships_makes_no_table_drafter(monkeypatch, capsys):
  """Nor does one that another drafter is made of: only tables have a limit."""
  overheads = fresh("overheads")
  monkeypatch.setitem(
    overheads._OPTIONS, "merge", {"first": "prompt_lookup", "second": "eagle"}
  )
  # Every draft ships: an engine could be made of each.
  monkeypatch.setattr(
    overheads, "make_engine", lambda *_, drafter, **__: pytest.fail(drafter)
  )
  flags.FLAGS(["overheads"])
  wanted = ["best_first", "eagle", "medusa", "merge"]
  overheads.drafter_pieces(None, None, wanted)
  shown = capsys.readouterr().err
  for name in ("best_first", "eagle", "medusa", "merge"):
    assert f"left out: {name}: it takes a draft" in shown


def test_an_index_of_another_tokenizer_is_refused(
  model, tmp_path, monkeypatch, capsys, unread
):
  """An index that was named is needed: nothing is timed without it."""
  index = corpus.build([[1, 2, 3]], tokenizer="another's", vocab_size=300)
  corpus.save(index, tmp_path / "x.npz")
  words = f"--model={model}", f"--corpus={tmp_path / 'x.npz'}"
  ran = run_command(monkeypatch, capsys, "overheads", *words)
  assert ran.code == 2 and ran.err.count("\n") == 1
  assert "was made with another tokenizer than the model's" in ran.err
