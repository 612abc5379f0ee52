"""Holds the words of pocket's conversations, and makes invented words beside them.

A word, a name or a value that `is_held_out` stands in no training conversation: the evaluation
draws from those only where it says so. ASCII, one word each.
"""

import random
import zlib
from typing import Final


def _words(text: str) -> tuple[str, ...]:
    words = tuple(text.split())
    assert len(set(words)) == len(words), [word for word in words if words.count(word) > 1]
    return words


NOUNS: Final = _words("""
    account address agenda airport album alarm anchor apartment archive arena army artist attic
    badge bakery balcony bank banner barn basement basket battery beach bell bench bicycle blanket
    board boat book bottle bowl branch bridge brush bucket budget building bus button cabin cable
    cake calendar camera camp candle canvas carpet cart castle cellar chair channel chapter chart
    church clinic clock cloud coach coat coin college column concert contract cottage counter
    course courtyard cup cupboard curtain dam database deck depot desk diary dictionary door dove
    drawer dress driver drum elevator engine envelope event exam exhibit fabric factory farm fence
    ferry festival field filter flag flight floor flute folder forest fork fountain frame freezer
    garage garden gate glass glove group guide guitar hall hammer harbor hat heater hedge helmet
    hill hotel house invoice island jacket journal jug kettle key kitchen kite ladder lake lamp
    lantern laptop lawn letter library light list locker lodge loft machine magazine mailbox map
    market meadow meeting menu meter mill mirror mobile model monitor motor mountain museum
    notebook novel office oven package page palace panel paper park parcel passport path pen
    phone piano picture pillow pipe plan plane plant plate platform pocketbook pond pool port
    poster printer prize project pump purse queue quilt radio railing ramp recipe record report
    ribbon ring river road robot rocket roof room rope route ruler sail salon scanner school
    screen sensor server shed shelf ship shirt shop shuttle sign sink socket sofa spoon square
    stadium stage stairs station statue stove street studio suitcase summit switch table tank
    tape target taxi teacher team telescope temple tent terminal theater ticket tool tower town
    train tray truck tunnel umbrella valley van vase vault vehicle village violin wagon wall
    wallet warehouse watch well wheel whistle window wing workshop yard zoo
""")
ATTRIBUTES: Final = _words("""
    code name number color price size owner label status password version height length weight
    age score level port title type speed capacity region category priority deadline location
    brand flavor shape serial tag limit topic theme nickname rank rate mode source target_date
    temperature volume width depth duration budget_line contact manager author
""")
ADJECTIVES: Final = _words("""
    amber ancient bitter blue brave bright broken calm clean clever cold copper crimson curly dark
    deep dry dusty eager early east empty fair fancy fast fierce flat fresh friendly front gentle
    giant golden grand gray green happy heavy hidden hollow honest huge humble icy inner iron jolly
    kind large late left light_gray little lonely long loud lower lucky main marble mellow middle
    modern narrow new noble north odd old open orange outer pale plain polite proud purple quick
    quiet rapid rare red rear rich right rough round royal rusty second secret shallow sharp shiny
    short silent silver simple slow small smooth soft solid south square_cut steep stone strange
    strong sturdy sunny sweet tall third tidy tiny upper velvet warm west white wide wild wise
    wooden yellow young
""")
VERBS: Final = _words("""
    open close start stop find search read write delete create send check update move copy rename
    list print lock unlock clean paint repair build measure count book cancel order pause resume
    record play raise lower heat cool fill drain mark sort scan test load save share hide show
    fetch translate convert schedule archive restore connect rotate mute inspect publish reserve
    track install remove weigh polish wrap charge sign label query compare merge split download
    upload refresh reset calibrate
""")
PARAMETERS: Final = _words("""
    city room level path name count unit color speed date query limit mode title amount size
    target user language format duration priority region recipient message reason width height
    time position channel folder key topic tag depth floor side owner source
""")
FIRST_NAMES: Final = _words("""
    Ada Alan Alice Amir Anna Anton Bella Ben Boris Carla Carlos Chen Clara Daniel David Dora Edith
    Elena Emil Emma Erik Eva Felix Fiona Frank Grace Greta Hana Hans Helen Hugo Ian Ida Igor Ines
    Iris Ivan Jack Jane Jonas Julia Karim Kate Kenji Kira Lara Leon Lena Liam Lina Lucas Luis Maja
    Marco Maria Mark Marta Max Mei Mia Milan Mina Nadia Nina Noah Nora Olga Omar Oscar Otto Paul
    Pedro Petra Priya Quinn Rafael Rita Robin Rosa Ruben Sam Sara Sofia Stefan Tara Theo Tom Uma
    Vera Victor Wanda Will Xenia Yara Yusuf Zoe
""")
CITIES: Final = _words("""
    Amsterdam Athens Bergen Berlin Bern Bogota Boston Bristol Cairo Chicago Copenhagen Dakar Delhi
    Denver Dublin Florence Geneva Ghent Hamburg Hanoi Havana Helsinki Istanbul Jakarta Kyoto Lagos
    Lima Lisbon London Lyon Madrid Malmo Manila Marseille Milan Montreal Munich Nairobi Naples Oslo
    Osaka Paris Perth Porto Prague Quito Reykjavik Riga Rome Rotterdam Seattle Seoul Seville Sofia
    Stockholm Sydney Tallinn Tokyo Toronto Turin Vienna Vilnius Warsaw Zurich
""")
COLORS: Final = _words(
    "black blue brown gold gray green orange pink purple red silver white yellow"
)
ANIMALS: Final = _words("""
    badger bear beaver camel cat cow crow deer dog dolphin donkey duck eagle falcon fox frog goat
    goose hamster hare hawk horse lion lizard llama mouse otter owl panda parrot penguin pig pony
    rabbit raven seal sheep snail spider squirrel swan tiger turtle whale wolf zebra
""")
FOODS: Final = _words("""
    apples bananas beans bread butter carrots cheese cherries chocolate cookies corn dumplings eggs
    figs grapes honey lemons lentils mangoes mushrooms noodles nuts olives onions pancakes pasta
    peaches pears pepper pizza plums potatoes pumpkin rice salad salmon soup spinach tomatoes
    waffles walnuts
""")
JOBS: Final = _words("""
    actor baker barber builder butcher carpenter chemist cook dancer dentist designer doctor
    editor electrician engineer farmer firefighter florist gardener historian judge lawyer librarian
    mechanic miner musician nurse painter pharmacist pilot plumber poet sailor scientist singer
    surgeon tailor teacher translator waiter weaver writer
""")
MONTHS: Final = _words(
    "January February March April May June July August September October November December"
)
ONSETS: Final = _words("b br c ch d dr f fl g gr h j k kl l m n p pr qu r s sh st t th tr v w y z")
VOWELS: Final = _words("a e i o u ai ea ee io ou")
CODAS: Final = ("", "", "", "l", "m", "n", "r", "s", "t", "x", "nd", "rk", "st", "lt")
HELD_OUT_IN: Final = 8  # one word of so many is left to the evaluation


def is_held_out(word: str) -> bool:
    """Say whether `word` is left to the evaluation, wherever it stands."""
    return zlib.crc32(word.lower().encode()) % HELD_OUT_IN == 0


def invented(rng: random.Random, held_out: bool = False) -> str:
    """Return a word of two or three syllables that no list has."""
    while True:
        syllables = (
            rng.choice(ONSETS)
            + rng.choice(VOWELS)
            + (rng.choice(CODAS) if rng.random() < 0.4 else "")
            for _ in range(rng.choice((2, 2, 3)))
        )
        word = "".join(syllables)
        if is_held_out(word) == held_out:
            return word


def value(rng: random.Random, held_out: bool = False) -> str:
    """Return what a fact may say: one piece of text without a blank in most cases."""
    draw = rng.random()
    if draw < 0.22:
        return str(rng.randrange(10 ** rng.choice((1, 2, 3, 4, 5))))
    if draw < 0.44:
        return invented(rng, held_out)
    if draw < 0.56:
        return invented(rng, held_out).capitalize()
    if draw < 0.62:
        letters = "".join(rng.choice("ABCDEFGHJKLMNPQRSTUVWXYZ") for _ in range(2))
        return f"{letters}-{rng.randrange(10, 10_000)}"
    if draw < 0.68:
        return f"{rng.randrange(24):02}:{rng.randrange(60):02}"
    if draw < 0.73:
        return date(rng)
    if draw < 0.78:
        return f"{rng.randrange(10)}.{rng.randrange(30)}.{rng.randrange(10)}"
    if draw < 0.83:
        return path(rng)
    return rng.choice(rng.choice((COLORS, CITIES, ANIMALS, FOODS, FIRST_NAMES, JOBS)))


def date(rng: random.Random) -> str:
    return f"{rng.randrange(1995, 2040)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"


def path(rng: random.Random) -> str:
    ending = rng.choice(("py", "txt", "md", "json", "toml", "ts", "go", "log"))
    folders = [rng.choice(("src", "lib", "docs", "tests", invented(rng), rng.choice(NOUNS)))]
    name = rng.choice((rng.choice(NOUNS), invented(rng)))
    return "/".join([*folders, f"{name}.{ending}"])
