"""Word lists and small text pieces of the training data. Pure Python, no randomness of its own."""

import random
import zlib
from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def _words(text: str) -> list[str]:
    return text.split()


WORDS = _words(
    """
    apple arrow baby bag ball band bank barn base basket bath beach bean bear bed bee bell belt
    bench bird blade blanket boat body bone book boot border bottle bow bowl box boy branch bread
    brick bridge broom brother brush bucket bus bush butter button cabin cake camel camera camp
    candle cannon canvas cap car card carpet carrot cart castle cat cave chain chair chalk cheese
    cherry chest chicken child circle city clay clock cloth cloud clover coal coast coat coffee
    coin comb cook copper corn cotton couch cow crab crane cream creek crown cup curtain dance
    deer desert desk diamond dog doll dolphin door dragon drawer dream dress drum duck dust eagle
    ear earth egg elbow engine eye face falcon farm feather fence field finger fire fish flag
    flame floor flower flute fog forest fork fox frame frog fruit garden gate ghost giant gift
    girl glass glove goat gold goose grape grass guitar hammer hand harbor hat hawk head heart
    hill honey horn horse hotel house ice ink iron island jacket jar jewel juice key king kitchen
    kite knee knife knot ladder lake lamp leaf lemon letter light lily lion lock log mango map
    maple marble market mask meadow melon metal milk mill mirror moon moth mountain mouse mouth
    nail neck needle nest net night nose nut oak ocean olive onion orange orchid oven owl paint
    palace palm pan panda paper park path peach pear pearl pen pencil pepper piano picture pie pig
    pillow pilot pin pine pipe plane planet plant plate plum pocket pond pony pool potato prince
    pump puzzle queen rabbit radio rain ribbon rice ring river road robot rock roof room root rope
    rose rug sail salad salt sand school sea seal seed shadow sheep shell ship shirt shoe shop
    shovel silk silver sister sky sled snail snake snow soap sock soil song soup spear spider
    spoon spring square squirrel stable stage stairs star station steam stick stone storm stove
    street sugar summer sun swan sword table tail tea temple tent tiger toast tomato tooth towel
    tower town toy train tree truck trumpet tulip tunnel turtle valley vase village violin wagon
    wall watch water wave whale wheat wheel whip wind window wine wing winter wolf wood wool yard
    """
)
NAMES = _words(
    """
    Anna Ben Carl Dora Emma Felix Grace Hugo Iris Jack Kate Leo Maria Nina Oscar Paul Rosa Sam Tom
    Vera Will Alice Bob David Eva Frank Helen Ivan Julia Karl Lena Max Nora Otto Peter Ruth Sara
    Theo Yara Zoe
    """
)
CITIES = _words(
    """
    Paris London Rome Berlin Madrid Tokyo Oslo Cairo Lima Dublin Vienna Prague Moscow Delhi Boston
    Chicago Sydney Milan Athens Lisbon Warsaw Munich Geneva Naples
    """
)
COLORS = _words(
    """
    red blue green yellow black white brown pink purple grey
    """
)
ADJECTIVES = _words(
    """
    old new small big quiet bright cold warm dry wet tall short soft hard round flat
    """
)
VERBS = _words(
    """
    saw found took made kept lost moved liked held left met passed followed painted touched
    carried
    """
)
FOODS = _words(
    """
    pizza pasta rice soup salad bread cheese fish cake fruit
    """
)

SYLLABLES = _words(
    """
    ba be bo da de du fa fi ga go ka ki lo lu ma mi mo na ne no pa pe ra re ri ro sa si ta te ti
    to va vo za zu
    """
)
FOREIGN = [
    "Wo ist der {w}?",
    "Was kostet das?",
    "Erzähl mir etwas über {c}.",
    "Wie wird das Wetter morgen?",
    "Où est la gare de {c}?",
    "Qu'est-ce que c'est?",
    "Je voudrais un {w}, s'il vous plaît.",
    "Quelle heure est-il à {c}?",
    "¿Dónde está {n}?",
    "¿Cuánto cuesta el {w}?",
    "Cuéntame algo de {c}.",
    "Dov'è la stazione di {c}?",
    "Come si chiama il {w}?",
    "Onde fica {c}?",
    "Hvad er klokken?",
    "Gdzie jest {c}?",
    "今天天气怎么样？",
    "你会做什么菜？",
    "これは何ですか？",
    "Где находится {c}?",
    "Как дела, {n}?",
    "كم الساعة؟",
    "अब क्या समय है?",
    "오늘 뭐 했어요?",
]


def pick(r: random.Random, items: Sequence[T]) -> T:
    """One of `items`; cheaper than random.choice."""
    return items[int(r.random() * len(items))]


def held_out(text: str) -> bool:
    """One prompt in 16, by checksum, is kept for evaluation and never trained on."""
    return zlib.crc32(text.encode()) % 16 == 7


def made_up(r: random.Random) -> str:
    """A word of two to four syllables that no list holds; always several tokens."""
    return "".join(pick(r, SYLLABLES) for _ in range(2 + int(r.random() * 3)))


def typo(r: random.Random, text: str) -> str:
    """Drops, doubles or swaps one letter inside a word of four letters or more."""
    spots = [
        i
        for i in range(1, len(text) - 2)
        if text[i - 1 : i + 3].isascii() and text[i - 1 : i + 3].isalpha()
    ]
    if not spots:
        return text
    i, kind = pick(r, spots), r.random()
    if kind < 0.4:
        return text[:i] + text[i + 1 :]
    if kind < 0.6:
        return text[:i] + text[i] + text[i:]
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def sentence(r: random.Random) -> str:
    """A statement of about ten tokens."""
    form = pick(
        r,
        [
            "The {a} {w} {v} the {x}.",
            "A {w} and a {x} {v} the {a} {y}.",
            "{n} {v} a {a} {w} in {c}.",
            "In {c} the {w} was {a}.",
            "{n} {v} the {w} near the {x}.",
            "It was a {a} day and the {w} was {b}.",
        ],
    )
    return fill(r, form)


def fill(r: random.Random, form: str) -> str:
    """Fills w x y (words), a b (adjectives), n (name), c d (cities), f (food), v (verb)."""
    return form.format(
        a=pick(r, ADJECTIVES),
        b=pick(r, ADJECTIVES),
        w=pick(r, WORDS),
        x=pick(r, WORDS),
        y=pick(r, WORDS),
        n=pick(r, NAMES),
        c=pick(r, CITIES),
        d=pick(r, CITIES),
        f=pick(r, FOODS),
        v=pick(r, VERBS),
    )
