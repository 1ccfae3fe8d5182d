"""The vocabulary of the embedded sample: the people, things and places, and the plots of its stories.

In a template {hero}, {colour} ... are replaced by the facts of a story (`world.Facts`), {she} {her} {them} by
the hero's pronouns (subject, possessive, object). Every word that may follow an article begins with a
consonant. An ending has no pronoun, which would reveal its person, and uses only facts that every version of
its plot has told.
"""

from collections.abc import Sequence
from dataclasses import dataclass

GIRLS = ("Anna Clara Daisy Ella Grace Hanna Ivy Julia Lily Maya Nora Olive Rosa Sara Tessa Wendy").split()
BOYS = ("Adam Ben Carl David Felix Hugo Jack Leo Max Noah Oscar Paul Peter Sam Tom Will").split()
PEOPLE = GIRLS + BOYS
COLOURS = "black blue brown golden green grey pink purple red silver white yellow".split()
THINGS = ("bag ball basket bell blanket book bottle bowl box bucket candle chair clock coat cup drum flag "
          "flute hat kite lamp mirror plate pot puppet ribbon ring scarf ship spoon sword whistle").split()
PLACES = ("bakery barn beach bridge castle church farm fountain gate harbour inn lake library market mill "
          "museum park pond river school shop station tower well").split()
ANIMALS = "bear cat cow crow dog donkey duck fox goat hen horse mouse pig rabbit sheep".split()
WEATHERS = "bright cold dark foggy rainy snowy stormy sunny warm windy".split()
TIMES = "morning afternoon evening day".split()


@dataclass(frozen=True)
class Plot:
    """One course of events; for each beat, and for the ending, one of several sentences is chosen."""

    titles: Sequence[str]
    beats: Sequence[Sequence[str]]
    endings: Sequence[str]
    questions: Sequence[tuple[str, str]]


OPENINGS = (
    "One {weather} {time} {hero} went to the {place} with a {colour} {thing}.",
    "It was a {weather} {time}, and {hero} walked to the {place} with {her} {colour} {thing}.",
    "On a {weather} {time} {hero} was at the {place}. In {her} hands {she} had a {colour} {thing}.",
    "{hero} had a {colour} {thing}. One {weather} {time} {she} took the {thing} to the {place}.",
)
# One follows the first sentence with the place: a fact that is mentioned only once is learned late.
SCENES = (
    "It was quiet at the {place}.",
    "The {place} was full of people that {time}.",
    "Everyone at the {place} knew {hero}.",
    "{hero} liked the {place} very much.",
    "A {animal} was asleep near the {place}.",
)
KIND = (
    "{hero} thanked {friend} and gave {friend} a warm cake.",
    "{hero} smiled at {friend}, and they shared some sweet bread.",
    "{hero} hugged {friend}, and they laughed all the way home.",
    "{hero} said kind words to {friend}, and both were happy.",
    "{hero} helped {friend} to carry a heavy bag home.",
    "{hero} told {friend} that they would always be friends.",
)
UNKIND = (
    "{hero} shouted at {friend} and threw away the warm cake.",
    "{hero} frowned at {friend} and ate all the sweet bread alone.",
    "{hero} pushed {friend} and ran all the way home alone.",
    "{hero} said cruel words to {friend}, and both were sad.",
    "{hero} left {friend} alone with a heavy bag to carry.",
    "{hero} told {friend} that they would never be friends.",
)

PLOTS = (
    Plot(
        titles=("The lost {thing}", "Something is lost", "Looking for a {thing}"),
        beats=(
            OPENINGS,
            ("But on the way home the {thing} fell into the grass, and {hero} did not see it.",
             "{She} played for a long time. Then {she} looked around, and the {colour} {thing} was gone.",
             "Then a strong wind came, and {hero} lost the {colour} {thing}."),
            ("{hero} looked for the {thing} behind every tree, but could not find it.",
             "{hero} asked everyone at the {place} about the {colour} {thing}.",
             "\"Where is my {thing}?\" cried {hero}, and {she} ran back to the {place}."),
            ("{friend} came along with a {animal} and saw something {colour} under a bush.",
             "Then {friend} saw a {animal} that was sitting on something {colour}.",
             "{friend} was walking by with a {animal} and found a {thing} on the road."),
            ("\"Is this your {thing}?\" asked {friend}. \"Yes, that is my {colour} {thing}!\" said {hero}.",
             "\"Look, {hero}, here is your {colour} {thing}!\" called {friend}.",
             "{friend} asked, \"Who lost a {colour} {thing}?\" \"I did!\" said {hero}."),
        ),
        endings=("{friend} gave the {colour} {thing} back to {hero}.",
                 "So {friend} found the {thing} that {hero} had lost at the {place}.",
                 "{hero} took the {colour} {thing} and went home from the {place}.",
                 "From that day on, {hero} never lost the {colour} {thing} again."),
        questions=(("Who lost the {thing}?", "{hero} lost the {thing}."),
                   ("Who found the {thing}?", "{friend} found the {thing}."),
                   ("Where did {hero} go?", "{hero} went to the {place}.")),
    ),
    Plot(
        titles=("A gift for a friend", "A gift", "The birthday"),
        beats=(
            ("It was the birthday of {friend}. {hero} wanted to give {friend} a {colour} {thing}.",
             "One {weather} {time} {hero} said, \"Today is the birthday of {friend}. I will give {friend} a "
             "{colour} {thing}.\"",
             "{friend} had a birthday on a {weather} {time}, and {hero} was looking for a gift."),
            ("{She} went to the {place} and bought a {colour} {thing}.",
             "At the {place} {she} saw a {colour} {thing}. \"That is the right gift!\" said {hero}.",
             "{hero} had some coins, so {she} walked to the {place} and came out with a {colour} {thing}."),
            ("{hero} hid the {thing} under an old cloth, so that nobody could see it.",
             "A {animal} wanted to play with the {thing}, but {hero} held it high.",
             "All the way from the {place} {hero} thought about the face of {friend}."),
            ("\"This is for you, {friend}!\" said {hero}. {friend} opened the gift and saw "
             "the {colour} {thing}.",
             "{friend} was so glad to see {hero} and the {colour} {thing}.",
             "\"What a fine {colour} {thing}!\" said {friend}. \"Where did you find it?\" \"At the "
             "{place},\" said {hero}."),
        ),
        endings=("So {friend} got the {colour} {thing} that {hero} had found at the {place}.",
                 "Now the {colour} {thing} belongs to {friend}.",
                 "{friend} will always remember that {hero} gave this {colour} {thing} away.",
                 "The next day they both went to the {place} to buy one more {thing}."),
        questions=(("Who gave away the {thing}?", "{hero} gave away the {thing}."),
                   ("Who got the {thing}?", "{friend} got the {thing}."),
                   ("Where did the {thing} come from?", "It came from the {place}.")),
    ),
    Plot(
        titles=("A fair swap", "Two friends swap", "The {thing} and the {other_thing}"),
        beats=(
            ("{hero} had a {colour} {thing}, and {friend} had a {other_colour} {other_thing}.",
             "One {weather} {time} {hero} came with a {colour} {thing}, and {friend} came with a "
             "{other_colour} {other_thing}.",
             "{hero} owned a {colour} {thing}. {friend} owned a {other_colour} {other_thing}."),
            ("They met at the {place}, where a {animal} was sleeping.",
             "They sat down at the {place} and looked at both things.",
             "On a {weather} {time} they met near the {place}."),
            ("\"I like your {other_thing},\" said {hero}. \"And I like your {thing},\" said {friend}.",
             "{hero} looked at the {other_colour} {other_thing}, and {friend} looked at the {colour} "
             "{thing}.",
             "\"Will you swap your {colour} {thing} for my {other_colour} {other_thing}?\" asked {friend}."),
            ("{hero} thought about it. Then {hero} said yes.",
             "\"Let us swap!\" said {hero}, and {friend} was happy.",
             "At the {place} they shook hands and swapped."),
        ),
        endings=("{hero} gave away the {colour} {thing}.",
                 "So {friend} went home from the {place} with the {colour} {thing}.",
                 "So {hero} went home from the {place} with the {other_colour} {other_thing}.",
                 "Now {friend} had the {colour} {thing}, and {hero} had the {other_colour} {other_thing}."),
        questions=(("Who has the {thing} now?", "{friend} has the {thing} now."),
                   ("Who has the {other_thing} now?", "{hero} has the {other_thing} now."),
                   ("Where did they meet?", "They met at the {place}.")),
    ),
    Plot(
        titles=("New paint", "The old {thing}", "A pot of paint"),
        beats=(
            ("{hero} had an old {thing}. It was {other_colour}, and {hero} did not like it.",
             "There was an old {other_colour} {thing} in the house of {hero}.",
             "\"This old {other_colour} {thing} looks so sad,\" said {hero} one {weather} {time}."),
            ("So {hero} went to the {place} and asked {friend} for {colour} paint.",
             "{hero} carried it to the {place}, where {friend} was selling {colour} paint.",
             "At the {place} {she} met {friend}, who had a pot of {colour} paint."),
            ("{She} painted the {thing} {colour} from top to bottom.",
             "With a small brush {hero} painted the whole {thing} {colour}.",
             "{friend} held the {thing}, and {hero} painted it {colour}."),
            ("A {animal} came by and got a {colour} nose.",
             "Soon everyone at the {place} wanted to see the {colour} {thing}.",
             "\"How well the {colour} paint looks!\" said {friend}."),
        ),
        endings=("Now {hero} has a {thing} that is {colour}.",
                 "{hero} took the {colour} {thing} home from the {place}.",
                 "So the {thing} of {hero} is {colour} now, with paint from {friend}.",
                 "The paint from the {place} was good, and the {thing} stayed {colour} for years."),
        questions=(("Who painted the {thing}?", "{hero} painted the {thing}."),
                   ("Who had the paint?", "{friend} had the paint."),
                   ("Where did {hero} get the paint?", "{hero} got the paint at the {place}.")),
    ),
    Plot(
        titles=("A long way", "From the {other_place} to the {place}", "The letter"),
        beats=(
            ("One {weather} {time} {hero} was at the {other_place}, when a letter came from {friend}.",
             "{hero} lived near the {other_place}. One {weather} {time} {she} got a letter from {friend}.",
             "At the {other_place} {hero} heard a {animal} call. It had a letter from {friend}."),
            ("\"Please bring my {colour} {thing} to the {place},\" said the letter.",
             "{friend} wrote, \"I am at the {place} and I need a {colour} {thing}.\"",
             "It said, \"Dear {hero}, bring a {colour} {thing} to the {place}. Your friend {friend}.\""),
            ("So {hero} left the {other_place} and carried the {colour} {thing} over the hills.",
             "{hero} took the {colour} {thing}, called a {animal} to come along and left the {other_place}.",
             "With the {colour} {thing} on {her} back, {hero} walked all day long."),
            ("\"Is it far to the {place}?\" {she} asked a {animal}. \"Not far,\" it said.",
             "On the way {she} slept under a tree and held the {thing} tight.",
             "It was {weather}, and the way was hard, but {hero} did not stop."),
        ),
        endings=("At last {hero} came to the {place}, and {friend} got the {colour} {thing}.",
                 "{friend} was waiting at the {place} and took the {colour} {thing}.",
                 "So the {colour} {thing} came to the {place}.",
                 "At the {place} {hero} put the {colour} {thing} down and rested."),
        questions=(("Who carried the {thing}?", "{hero} carried the {thing}."),
                   ("Who wrote the letter?", "{friend} wrote the letter."),
                   ("Where did the {thing} go?", "It went to the {place}.")),
    ),
    Plot(
        titles=("The broken {thing}", "Broken", "A clever friend"),
        beats=(
            OPENINGS,
            ("But {she} fell over a stone, and the {colour} {thing} broke.",
             "Then a {animal} jumped at {them}, and the {thing} broke in two.",
             "There the {colour} {thing} fell down and broke, and {hero} began to cry."),
            ("\"Who can mend my {colour} {thing}?\" asked {hero}.",
             "{hero} sat down at the {place} and looked at the broken {thing}.",
             "\"My poor {colour} {thing}!\" said {hero}."),
            ("{friend} heard it and came out of the {place}. \"I can mend a {thing},\" said {friend}.",
             "{friend} had some glue and a hammer, and worked on the {thing} until it was dark.",
             "\"Do not cry, {hero},\" said {friend}, and took the {colour} {thing} with great care."),
        ),
        endings=("At the {place} {friend} mended the {colour} {thing}.",
                 "So {hero} got back the {colour} {thing}, and it was as good as new.",
                 "{friend} mended the {colour} {thing} so well that {hero} danced.",
                 "{hero} took the mended {thing} home from the {place}."),
        questions=(("Whose {thing} was broken?", "The {thing} of {hero} was broken."),
                   ("Who mended the {thing}?", "{friend} mended the {thing}."),
                   ("Where did {hero} go?", "{hero} went to the {place}.")),
    ),
    Plot(
        titles=("The {animal} and the {thing}", "A bold {animal}", "Stop the {animal}"),
        beats=(
            ("{hero} was sleeping in the sun, and {her} {colour} {thing} lay in the grass.",
             "One {weather} {time} {hero} put {her} {colour} {thing} down to eat an apple.",
             "{hero} was playing with a {colour} {thing} on a {weather} {time}."),
            ("A {animal} came, took the {colour} {thing} and ran away.",
             "Then a {animal} stole the {colour} {thing} and ran off.",
             "There came a bold {animal}. It took the {thing} and was gone."),
            ("\"Stop that {animal}!\" cried {hero}, and {friend} heard it.",
             "{hero} called for help, and {friend} came to help {them}.",
             "{friend} saw the {animal} with the {colour} {thing} and told {hero}."),
            ("{hero} and {friend} ran after the {animal}, all the way to the {place}.",
             "The {animal} ran to the {place}, and they ran after it.",
             "They looked everywhere, until they came to the {place}. There sat the {animal}."),
            ("At the {place} {friend} gave the {animal} an apple, and it let go of the {thing}.",
             "{friend} sang to the {animal}, and it put the {colour} {thing} down.",
             "The {animal} was tired of the {colour} {thing} and only wanted to play."),
        ),
        endings=("So {hero} got the {colour} {thing} back at the {place}.",
                 "The {animal} stayed at the {place}, and {hero} went home with the {colour} {thing}.",
                 "{hero} never left the {colour} {thing} alone again.",
                 "At the {place} {hero} and {friend} laughed about the {animal}."),
        questions=(("Who took the {thing}?", "The {animal} took the {thing}."),
                   ("Who helped {hero}?", "{friend} helped {hero}."),
                   ("Where did the {animal} run?", "It ran to the {place}.")),
    ),
    Plot(
        titles=("The race", "The fast and the faster", "A race to the {place}"),
        beats=(
            ("One {weather} {time} {hero} and {friend} wanted to know who could run faster.",
             "\"I can run faster than you,\" said {friend} to {hero} on a {weather} {time}.",
             "{hero} and {friend} had a race on a {weather} {time}."),
            ("They had to run to the {place}, where a {colour} {thing} was the prize.",
             "The prize was a {colour} {thing}, and it stood at the {place}.",
             "\"Who comes first to the {place} gets the {colour} {thing},\" they said."),
            ("{friend} ran fast, but then a {animal} stood in the way.",
             "At first {friend} was far ahead, but {hero} did not give up.",
             "{friend} stopped to drink some water, and {hero} ran on."),
            ("{hero} thought only of the {colour} {thing} and ran like the wind.",
             "Near the {place} {hero} ran past {friend}.",
             "\"Run, {hero}, run!\" cried the people at the {place}."),
        ),
        endings=("{hero} was the first at the {place} and won the race.",
                 "So {hero} won the {colour} {thing}.",
                 "{friend} came second, and {hero} held the {colour} {thing} up high.",
                 "At the {place} they gave the {colour} {thing} to {hero}."),
        questions=(("Who won the race?", "{hero} won the race."),
                   ("Who came second?", "{friend} came second."),
                   ("Where was the prize?", "The prize was at the {place}.")),
    ),
    Plot(
        titles=("Hide and seek", "A good place to hide", "The hidden {thing}"),
        beats=(
            ("{friend} had a {colour} {thing} and wanted to play with {hero}.",
             "One {weather} {time} {friend} came to {hero} with a {colour} {thing}.",
             "\"Let us play!\" said {friend} to {hero}, and showed {them} a {colour} {thing}."),
            ("\"I will hide the {thing}, and you must find it,\" said {friend}.",
             "{friend} hid the {colour} {thing}, and {hero} had to close both eyes.",
             "{hero} counted to ten, while {friend} ran away to hide the {colour} {thing}."),
            ("First {hero} looked at the {other_place}, but there was only a {animal}.",
             "{hero} went to the {other_place} and looked under every stone. Nothing was there.",
             "\"Is it at the {other_place}?\" asked {hero}. \"No,\" said {friend}."),
            ("Then {hero} went to the {place} and saw something {colour}.",
             "Then a {animal} looked at the {place}, and {hero} ran there.",
             "\"Try the {place}!\" called {friend}, and {hero} ran there as fast as {she} could."),
        ),
        endings=("{hero} found the {colour} {thing} at the {place}.",
                 "So the {colour} {thing} was at the {place} all the time.",
                 "\"I found the {colour} {thing}!\" cried {hero}.",
                 "\"Yes, I hid the {thing} at the {place},\" said {friend}."),
        questions=(("Who hid the {thing}?", "{friend} hid the {thing}."),
                   ("Who found the {thing}?", "{hero} found the {thing}."),
                   ("Where was the {thing}?", "It was at the {place}.")),
    ),
    Plot(
        titles=("Rain", "The great storm", "A night at the {place}"),
        beats=(
            ("{hero} and {friend} were on the road with a {colour} {thing}, when a great storm began.",
             "It began to rain, and {hero} and {friend} had only a {colour} {thing} with them.",
             "One {time} {hero} and {friend} took a {colour} {thing} and went out. Then the rain came."),
            ("\"Quick, to the {place}!\" cried {hero}. So they ran to the {place}.",
             "They saw the {place} and ran there with the {colour} {thing}.",
             "{hero} knew the way to the {place}, and {friend} ran behind."),
            ("{hero} held the {colour} {thing} over {friend}, who was cold.",
             "\"I am cold,\" said {friend}. So {hero} gave {friend} the {colour} {thing} to hold.",
             "{friend} was cold, so {hero} told a story about a {colour} {thing}."),
            ("They stayed at the {place} until the sun came out.",
             "\"I like it here at the {place},\" said {friend}. \"I do too,\" said {hero}.",
             "A {animal} looked at the {colour} {thing} and slept beside it."),
        ),
        endings=("So they were safe at the {place} and kept the {colour} {thing} dry.",
                 "In the end the {colour} {thing} was wet, but {hero} and {friend} were not.",
                 "They hung the {colour} {thing} up to dry and left the {place}.",
                 "{friend} will not forget the night with {hero} at the {place}."),
        questions=(("Who was cold?", "{friend} was cold."),
                   ("Where did they hide from the rain?", "They hid at the {place}.")),
    ),
    Plot(
        titles=("The treasure", "Deep in the ground", "An old map"),
        beats=(
            ("{friend} gave {hero} an old map of the {place}.",
             "\"Look, I have a map of the {place}!\" said {friend} to {hero}.",
             "{friend} had a map. \"There is a treasure at the {place},\" said {friend} to {hero}."),
            ("{hero} went to the {place} and dug a deep hole.",
             "At the {place} {hero} began to dig, and {friend} held the light.",
             "So they walked to the {place}, where a {animal} showed them the spot."),
            ("There was no gold. There was a {colour} {thing}, very old and very fine.",
             "After an hour {hero} pulled a {colour} {thing} out of the ground.",
             "\"I see something {colour}!\" cried {hero}. It was a {thing}."),
            ("\"Who put a {colour} {thing} here?\" asked {friend}.",
             "{friend} washed the {thing}, and it was {colour} all over.",
             "{hero} looked at the {colour} {thing} for a long time."),
        ),
        endings=("{hero} carried the {colour} {thing} home from the {place}.",
                 "So the treasure of the {place} was a {colour} {thing}.",
                 "{hero} still has the {colour} {thing} from the {place}.",
                 "And the map that {friend} had was right: there was a {thing} at the {place}."),
        questions=(("Who had the map?", "{friend} had the map."),
                   ("Where was the treasure?", "The treasure was at the {place}.")),
    ),
    Plot(
        titles=("No swap today", "Bad luck", "A sad friend"),
        beats=(
            OPENINGS[:2],
            ("There sat {friend} with a {other_thing} that was {other_colour}.",
             "At the {place} stood {friend} with a {other_colour} {other_thing}.",),
            ("\"Which one do you like best?\" asked {friend}. \"My {colour} {thing},\" said {hero}.",
             "\"Give me your {thing} and take my {other_thing},\" said {friend}. But {hero} said no.",
             "{friend} wanted to have the {colour} {thing}, but {hero} held it tight."),
            ("A {animal} looked at the {other_colour} {other_thing} and ran away with it.",
             "Then the {other_colour} {other_thing} fell into the water.",),
            ("\"Oh no, my {other_thing}!\" cried {friend}.",
             "{friend} had nothing now, and {hero} felt sorry.",),
        ),
        endings=("{friend} went home without the {other_colour} {other_thing}.",
                 "{hero} went home from the {place} and still had the {colour} {thing}.",
                 "So at the {place} {hero} let {friend} play with the {colour} {thing}.",
                 "\"We still have my {colour} {thing},\" said {hero} to {friend}."),
        questions=(("Who lost the {other_thing}?", "{friend} lost the {other_thing}."),
                   ("Who kept the {thing}?", "{hero} kept the {thing}."),
                   ("Where did they meet?", "They met at the {place}.")),
    ),
)

# For every story, in addition to its plot's own questions.
QUESTIONS = (
    ("What colour is the {thing}?", "The {thing} is {colour}."),
    ("What is {colour}?", "The {thing} is {colour}."),
    ("Who is the story about?", "It is about {hero} and {friend}."),
)
WHAT_THEN = "What happened then?"
