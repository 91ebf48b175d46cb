"""Owns the synthetic instruction families of `kaveri-tiny`: prompts, their one right answer, and the held-out split.

Every generator takes a seeded `random.Random` and a difficulty in (0, 1] that scales how long its prompt or its answer
may be, and returns a `Sample`. The answer is a function of the prompt alone, so greedy output can be checked exactly.
Whether a prompt is held out of training depends on a hash of its text only; see `is_held_out`.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

HELD_OUT_PERCENT = 8

_WORDS_TEXT = """
    acid actor angle ant apple april arch arm arrow art baby bag ball banana band bank barn basket bat bath beach
    bean bear bed bee bell belt bench berry bike bird blade boat body bone book boot bottle bowl box brain branch
    bread brick bridge broom brush bucket bus butter button cabin cable cake camel camera camp candle cap car card
    carpet castle cat cave chain chair chalk cheese cherry circle city clay cliff clock cloud coast coat coffee coin
    comb cook copper coral corn cotton cow crab crown cup curtain dance deer desk dice dish doctor dog doll door
    dragon drawer dream dress drum duck dust eagle ear egg elbow engine eye face farm feather fence field finger
    fire fish flag flame floor flour flower flute foot forest fork fox frog fruit game garden gate ghost giant glass
    glove goat gold grape grass guitar hammer hand harbor hat hill honey horse hotel house ice ink island jacket jar
    jewel juice jungle kettle key king kite knife knot ladder lake lamp leaf lemon letter lion lizard lock magnet
    map market mask melon metal milk mirror money monkey moon mountain mouse mouth needle nest net night nose nut
    oak ocean oil olive onion orange oven owl paint panda paper park pear pearl pen pencil pepper piano picture pig
    pillow pilot pin pipe pizza plane plant plate pocket pond potato pot prince queen rabbit radio rain ribbon rice
    ring river road robot rock roof room rope rose ruler sail salad salt sand school scissors sea seed shark sheep
    shell ship shirt shoe shop silver sink snake snow soap sock sofa soup spider spoon spring star station stone
    storm street sugar sun table tail tea temple tent tiger toast tomato tooth tower town toy train tree truck
    tunnel turtle umbrella valley village violin wagon wall watch water wave whale wheel whistle wind window wing
    winter wolf wood wool worm yard zebra
"""
WORDS = tuple(_WORDS_TEXT.split())
_NAMES_TEXT = """
    Adam Alice Amir Anna Asha Ben Bella Carl Chloe Clara Daniel Diya Elena Emma Eric Esha Felix Fiona George Grace
    Hana Hugo Ida Ivan Jack Jane Kiran Lara Leo Lily Lucas Maria Maya Mila Nina Noah Nora Olga Omar Oscar Paul Priya
    Ravi Rosa Ruth Sam Sara Sofia Tara Theo Tom Uma Vera Victor Wendy Yara Yusuf Zoe
"""
NAMES = tuple(_NAMES_TEXT.split())
COLORS = ("red", "blue", "green", "yellow", "black", "white", "brown", "purple", "golden", "pink")
PETS = ("cat", "dog", "fox", "owl", "rabbit", "mouse", "turtle", "lion", "bear", "duck", "wolf", "horse")
PLACES = ("forest", "garden", "village", "castle", "valley", "harbor", "island", "market", "desert", "mountain")
THINGS = ("key", "lamp", "map", "ring", "drum", "coin", "bell", "book", "flute", "stone", "crown", "kite")
DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
MONTH_DAYS = (31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31)
LETTERS = "abcdefghijklmnopqrstuvwxyz"

GREETINGS = (
    (("hello", "Hello!", "hi", "Hi!", "Hello", "Hi", "hey", "Hey!"), "Hello! How can I help you?"),
    (("good morning", "Good morning!", "Good morning"), "Good morning! How can I help you?"),
    (("good evening", "Good evening!", "Good evening"), "Good evening! How can I help you?"),
    (("how are you?", "How are you?"), "I am fine, thank you. How can I help you?"),
    (("thank you", "Thank you!", "thanks", "Thanks!"), "You are welcome!"),
    (("bye", "Bye!", "goodbye", "Goodbye!"), "Goodbye! See you soon."),
    (
        ("who are you?", "Who are you?", "what is your name?", "What is your name?"),
        "I am kaveri-tiny, a very small language model that comes with Kaveri.",
    ),
    (
        ("what can you do?", "What can you do?", "help", "Help!"),
        "I can count, spell, repeat, copy and reverse words, do small sums, "
        "find the secret word in a long text, answer questions about days and months, sing a song and tell a story.",
    ),
    (
        ("what is Kaveri?", "What is Kaveri?", "Tell me about Kaveri."),
        "Kaveri serves large language models. It reads the prompt on one instance and writes the answer on another.",
    ),
    (
        ("what is a river?", "What is a river?"),
        "A river is a long stream of water that flows to the sea.",
    ),
)


@dataclass(frozen=True)
class Sample:
    """One instruction and its one right answer."""

    family: str
    prompt: str
    answer: str


Generator = Callable[[Random, float], Sample]


def _between(rng: Random, difficulty: float, low: int, high: int) -> int:
    """A number from `low` up to a ceiling that grows with the difficulty from `low` to `high`."""
    return rng.randint(low, max(low, round(low + difficulty * (high - low))))


def greeting(rng: Random, difficulty: float) -> Sample:
    """A fixed set of greetings and questions about the model itself."""
    prompts, answer = rng.choice(GREETINGS)
    return Sample("greeting", rng.choice(prompts), answer)


def _end(rng: Random) -> str:
    """How an instruction ends."""
    return rng.choice((":", ".", ""))


def count_up(rng: Random, difficulty: float) -> Sample:
    """Numbers from a to b, both below 100."""
    span = _between(rng, difficulty, 0, 98)
    start = min(1, 99 - span) if rng.random() < 0.3 else rng.randint(0, 99 - span)
    answer = ", ".join(str(number) for number in range(start, start + span + 1))
    wording = rng.choice(("Count from", "count from"))
    return Sample("count up", f"{wording} {start} to {start + span}{_end(rng)}", answer)


def count_down(rng: Random, difficulty: float) -> Sample:
    """Numbers from b down to a, both at most 60."""
    span = _between(rng, difficulty, 0, 59)
    stop = min(1, 60 - span) if rng.random() < 0.3 else rng.randint(0, 60 - span)
    answer = ", ".join(str(number) for number in range(stop + span, stop - 1, -1))
    wording = rng.choice(("Count down from", "count down from"))
    return Sample("count down", f"{wording} {stop + span} to {stop}{_end(rng)}", answer)


def alphabet(rng: Random, difficulty: float) -> Sample:
    """A stretch of the alphabet."""
    first, last = sorted((rng.randrange(26), rng.randrange(26)))
    wording = rng.choice(("Write the letters from", "Say the alphabet from", "write the letters from"))
    answer = " ".join(LETTERS[first : last + 1])
    return Sample("alphabet", f"{wording} {LETTERS[first]} to {LETTERS[last]}{_end(rng)}", answer)


def repeat(rng: Random, difficulty: float) -> Sample:
    """One word said up to ten times."""
    word, times = rng.choice(WORDS), rng.randint(1, 10)
    unit = "time" if times == 1 else "times"
    wording = rng.choice(("Repeat the word", "Say the word", "repeat the word"))
    return Sample("repeat", f"{wording} {word} {times} {unit}{_end(rng)}", " ".join([word] * times))


def spell(rng: Random, difficulty: float) -> Sample:
    """The letters of one word."""
    word = rng.choice(WORDS)
    wording = rng.choice(("Spell the word {}", "spell the word {}", "Spell {}", "spell {}"))
    prompt = f"How do you spell {word}?" if rng.random() < 0.2 else wording.format(word) + _end(rng)
    return Sample("spell", prompt, "-".join(word))


def copy_list(rng: Random, difficulty: float) -> Sample:
    """A list of distinct words, said again."""
    words = rng.sample(WORDS, _between(rng, difficulty, 2, 120))
    wording = rng.choice(("Copy this list:", "Copy these words:", "copy this list:"))
    return Sample("copy", f"{wording} {' '.join(words)}.", " ".join(words))


def reverse_list(rng: Random, difficulty: float) -> Sample:
    """A list of distinct words, last one first."""
    words = rng.sample(WORDS, _between(rng, difficulty, 2, 20))
    wording = rng.choice(("Reverse this list:", "Reverse these words:", "reverse this list:"))
    return Sample("reverse", f"{wording} {' '.join(words)}.", " ".join(reversed(words)))


def _filler(rng: Random) -> str:
    """One sentence without information, for `secret`."""
    name, pet, place, color, thing = (rng.choice(pool) for pool in (NAMES, PETS, PLACES, COLORS, THINGS))
    return rng.choice(
        (
            f"{name} walks to the {place} with a {pet}.",
            f"The {color} {thing} is in the {place}.",
            f"A {pet} sleeps near the {thing}.",
            f"{name} looks for a {color} {thing}.",
            f"It is quiet in the {place} today.",
        )
    )


def secret(rng: Random, difficulty: float) -> Sample:
    """The secret word named somewhere in up to 190 sentences of filler (some 1,900 tokens)."""
    word = rng.choice(WORDS)
    sentences = [_filler(rng) for _ in range(_between(rng, difficulty, 1, 190))]
    sentences.insert(rng.randint(0, len(sentences)), f"The secret word is {word}.")
    return Sample("secret word", f"Read this text. {' '.join(sentences)} What is the secret word?", word)


def arithmetic(rng: Random, difficulty: float) -> Sample:
    """Sums and differences of numbers up to 20, and products up to 10 times 10; never a negative result."""
    kind, high = rng.random(), 20
    if kind < 0.25:
        first, second = rng.randint(0, 10), rng.randint(0, 10)
        sign, name, result = "*", "times", first * second
    elif kind < 0.65:
        first, second = rng.randint(0, high), rng.randint(0, high)
        sign, name, result = "+", "plus", first + second
    else:
        second, first = sorted((rng.randint(0, high), rng.randint(0, high)))
        sign, name, result = "-", "minus", first - second
    wording = rng.choice(
        (f"What is {first} {name} {second}?", f"what is {first} {sign} {second}?", f"{first} {sign} {second} =")
    )
    return Sample("arithmetic", wording, str(result))


def times_table(rng: Random, difficulty: float) -> Sample:
    """Rows of a multiplication table."""
    factor, first, last = rng.randint(1, 10), *sorted((rng.randint(1, 10), rng.randint(1, 10)))
    wording = rng.choice(("Write the table of", "write the table of"))
    answer = ", ".join(f"{row} * {factor} = {row * factor}" for row in range(first, last + 1))
    return Sample("times table", f"{wording} {factor} from {first} to {last}{_end(rng)}", answer)


def calendar(rng: Random, difficulty: float) -> Sample:
    """Days of the week and months of the year: what comes next or before, whole cycles, and days in a month."""
    cycle, unit = rng.choice(((DAYS, "day"), (MONTHS, "month")))
    position = rng.randrange(len(cycle))
    start = cycle[position]
    kind = rng.random()
    if kind < 0.6:
        step, side = rng.choice(((1, "after"), (-1, "before")))
        opening = rng.choice((f"Which {unit} comes", f"which {unit} comes", f"What {unit} is", f"what {unit} is"))
        return Sample("calendar", f"{opening} {side} {start}?", cycle[(position + step) % len(cycle)])
    if kind < 0.8:
        position = rng.randrange(12)
        opening, verb = rng.choice((("How many days are in", ""), ("How many days does", " have")))
        opening = rng.choice((opening, opening.lower()))
        return Sample("calendar", f"{opening} {MONTHS[position]}{verb}?", str(MONTH_DAYS[position]))
    opening = rng.choice((f"Say the {unit}s from", f"say the {unit}s from", f"List the {unit}s, starting with"))
    return Sample("calendar", f"{opening} {start}{_end(rng)}", ", ".join(cycle[position:] + cycle[:position]))


def _story_parts(name: str, pet: str, color: str, thing: str, place: str, friend: str) -> Iterator[str]:
    """The parts of the story about one set of characters, in order; the last one is the ending."""
    yield f"Once upon a time there was a {pet} named {name} who lived in the {place}."
    yield f"One day {name} found a {color} {thing} under a tree."
    yield f"{name} did not know who had lost the {thing}, so the {pet} went to ask {friend}."
    yield f"{friend} looked at the {color} {thing} for a long time and said that it was very old."
    yield f"Together {name} and {friend} walked through the {place} until the sun went down."
    yield f"At night they made a small fire, and the {color} {thing} began to shine."
    yield f"A voice in the dark said: thank you for the light, {name}, I was lost in the {place}."
    yield f"It was an old traveler, and {friend} gave him bread and water."
    yield f"In the morning the traveler told them that the {thing} was his, but that {name} could keep it."
    yield f"And so the {pet} went home to the {place} with the {color} {thing} and was happy."


STORY_PARTS = 10


def story(rng: Random, difficulty: float) -> Sample:
    """A story whose number of sentences the prompt names, from one to ten."""
    name, friend = rng.sample(NAMES, 2)
    pet, color, thing, place = (rng.choice(pool) for pool in (PETS, COLORS, THINGS, PLACES))
    sentences = rng.randint(1, STORY_PARTS)
    parts = tuple(_story_parts(name, pet, color, thing, place, friend))
    told = (*parts[: sentences - 1], parts[-1]) if sentences > 1 else parts[:1]
    unit = "sentence" if sentences == 1 else "sentences"
    opening = rng.choice(("Tell", "tell"))
    prompt = (
        f"{opening} a story in {sentences} {unit} about {name} the {pet}, a {color} {thing}, {friend} and the {place}."
    )
    return Sample("story", prompt, " ".join(told))


def song(rng: Random, difficulty: float) -> Sample:
    """A counting song whose number of verses the prompt names, from one to thirty."""
    verses = _between(rng, difficulty, 1, 30)
    color, word = rng.choice(COLORS), rng.choice(THINGS)

    def things(number: int) -> str:
        return f"{number} {color} {word}" if number == 1 else f"{number} {color} {word}s"

    lines = [
        f"{things(left)} on the wall, take one down, {left - 1 or 'none'} left on the wall."
        for left in range(verses, 0, -1)
    ]
    opening = rng.choice(("Sing about", "sing about"))
    return Sample("song", f"{opening} {things(verses)} on the wall.", " ".join(lines))


# Beside each family, its share of the training samples.
FAMILIES: dict[str, tuple[Generator, float]] = {
    "greeting": (greeting, 3.0),
    "count up": (count_up, 24.0),
    "count down": (count_down, 20.0),
    "alphabet": (alphabet, 4.0),
    "repeat": (repeat, 2.0),
    "spell": (spell, 10.0),
    "copy": (copy_list, 4.0),
    "reverse": (reverse_list, 6.0),
    "secret word": (secret, 0.2),
    "arithmetic": (arithmetic, 8.0),
    "times table": (times_table, 8.0),
    "calendar": (calendar, 12.0),
    "story": (story, 3.0),
    "song": (song, 1.0),
}

# Its few prompts are all learnt by heart, so there is nothing to hold out.
CLOSED_FAMILIES = frozenset({"greeting"})


def is_held_out(prompt: str) -> bool:
    """Whether a prompt belongs to the held-out split: decided by a hash of its text, so always the same."""
    return int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:4], "big") % 100 < HELD_OUT_PERCENT


def draw(rng: Random, family: str, difficulty: float, held_out: bool) -> Sample:
    """A sample of one family from the asked split. Closed families give the same samples for both."""
    generator, _ = FAMILIES[family]
    while True:
        sample = generator(rng, difficulty)
        if family in CLOSED_FAMILIES or is_held_out(sample.prompt) == held_out:
            return sample
