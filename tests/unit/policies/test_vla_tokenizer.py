from __future__ import annotations

import re

import pytest
import torch
from tests.refusals import refused

from apexrl.core.errors import ConfigError
from apexrl.envs.suites.instructions import INSTRUCTIONS
from apexrl.policies.vla import SIZES, WordTokenizer, instruction_tensor

# Words of LIBERO's instructions, and others that robots hear; those of Meta-World's come from the suite.
VOCABULARY = """
a alphabet and another arm assembly at back ball barbecue basket basketball beer between bin black block book both
bottle bottom bowl box brown burner butter button by cabinet caddies caddy cake can ceramic cereal cheese chefmate
chocolate clockwise close coffee compartment cookie corn counter cream cup cups desk dial disassemble dish door down
drawer dressing end faucet flat floor forward from front frypan gate get glass goal grasp gray green grill gripper
ground hammer hand handle hang hole hook in insert inside into it its juice ketchup knob lamp leave left leftmost
lever lid lift light lock locked machine mat microwave middle milk mirror mode moka moving mug nail next nut object of
off on onto open orange out oven over pack pan peg pick place placed plate plug popcorn porcelain position pot press
puck pudding pull pulling push put rack ramekin reach red right rightmost rim ring robot rotate round salad sauce
shelf side sink slide slider small soccer socket soup spatula spot square stack stapler stick stove sweep table target
that the thermos tip to together tomato top topdown toward towards towel toy tray turn twist under unlock unplug up
use wall white window wine with without wooden yellow
"""


def words(*texts: str, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    buckets, present = WordTokenizer(**options)(torch.stack([instruction_tensor(text) for text in texts]))
    return buckets, present


@pytest.mark.parametrize("num_buckets", sorted({size.num_buckets for size in SIZES.values()}))
def test_the_words_of_the_suites_are_all_told_apart(num_buckets: int) -> None:
    vocabulary = sorted({*VOCABULARY.split(), *re.findall(r"\w+", " ".join(INSTRUCTIONS.values()).lower())})
    buckets, present = words(*vocabulary, num_buckets=num_buckets)
    assert present[:, 0].all()
    assert not present[:, 1:].any()
    assert ((buckets >= 0) & (buckets < num_buckets)).all()
    assert len({tuple(pair) for pair in buckets[:, 0].tolist()}) == len(vocabulary) > 200


def test_a_word_is_the_same_wherever_it_stands_and_however_it_is_written() -> None:
    buckets, present = words("Open the DRAWER!", "the drawer,open", "öffne 2 the-open")
    assert present.sum(-1).tolist() == [3, 3, 4]
    the, drawer, opened = buckets[1, 0].tolist(), buckets[1, 1].tolist(), buckets[1, 2].tolist()
    assert buckets[0, :3].tolist() == [opened, the, drawer]
    assert buckets[2, 2:4].tolist() == [the, opened]


def test_letters_count_by_their_place() -> None:
    buckets, _ = words("on", "no", "o", "oo")
    assert len({tuple(row[0].tolist()) for row in buckets}) == 4


def test_words_beyond_the_limit_and_empty_instructions() -> None:
    buckets, present = words("one two three four", "", max_words=2)
    assert present.tolist() == [[True, True], [False, False]]
    assert torch.equal(buckets[0], words("one two", max_words=2)[0][0])


def test_an_instruction_that_is_too_long_is_refused() -> None:
    with refused(ConfigError, 96, 97):
        instruction_tensor("x" * 97)


def test_the_instructions_of_the_suite_fit_and_differ() -> None:
    buckets, present = words(*INSTRUCTIONS.values())
    assert present.sum(-1).max() < present.shape[1], "no instruction is cut off"
    assert len({str(row.tolist()) for row in buckets}) == len(INSTRUCTIONS)
