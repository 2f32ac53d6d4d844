"""The words and phrases that the demo model's conversations are made of."""

from __future__ import annotations

from collections.abc import Sequence


def pool(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NAMES = pool(
    "Anna Ben Clara David Emma Felix Grace Henry Ivy Jack Kate Leo Mia Noah Olivia Paul Quinn Rosa Sam "
    "Tina Uma Victor Wendy Xena Yusuf Zoe Alice Bob Carol Dan Eve Frank Gina Hugo Ines John Karl Lena Max "
    "Nina Oscar Petra Ravi Sara Tom Ursula Vera Will Yara Ali Maria Peter Linda James Mary Robert Lucy "
    "Chen Wei Yuki Omar Fatima"
)

FOODS = pool(
    "apple banana cherry date egg fig grape honey jam kiwi lemon mango nut olive pear quince rice salt "
    "tea vanilla walnut yam bread butter cheese milk orange peach plum tomato potato onion carrot bean "
    "corn fish"
)

THINGS = pool(
    "pen book lamp chair table cup plate knife bag shoe hat coat phone clock key box ball kite drum ring "
    "rope bike boat tent mat fan jar saw nail zip wheel axe"
)

ANIMALS = pool(
    "ant bear cat dog eagle fox goat horse ibis jaguar koala lion mouse newt owl pig rabbit snake tiger wolf"
)

COLOURS = pool("red blue green yellow black white pink brown grey purple orange gold silver")

CITIES = pool(
    "Paris London Berlin Rome Madrid Tokyo Cairo Oslo Lima Delhi Vienna Athens Dublin Prague Boston "
    "Chicago Lagos Zurich Milan Seoul Sydney Geneva"
)

DAYS = pool("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")

EVENTS = pool("lunch dinner meeting party workshop concert review training breakfast call")

ONSETS = pool("b c d f g h j k l m n p r s t v w z br ch cl dr fl gr pl sh st tr")

VOWELS = pool("a e i o u ai ee oo ou")

WORD_POOLS: tuple[Sequence[str], ...] = (NAMES, FOODS, THINGS, ANIMALS, COLOURS, CITIES)

ENDINGS = ["", "", "", *["n", "r", "s", "t", "l", "m", "k", "x", "nd", "rt"]]

GREETING = "Hello! How can I help you?"

IDENTITY = "I am sageLLM's demo model."

ABILITIES = "I can do small sums, look things up in a table, copy and sort lists, and extract JSON."

UNKNOWN = "Sorry, I am only a tiny demo model. " + ABILITIES

NO_NAME = "You have not told me your name yet."

SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are sageLLM's demo model.",
    "You are a helpful, concise assistant.",
    "Answer briefly.",
    "Be polite and brief.",
    "You are a careful assistant who checks every step.",
)

ADD_PROMPTS = (
    *("What is {a} + {b}?",) * 4,
    *("{a} + {b}",) * 2,
    *("{a}+{b}",) * 2,
    "{a} + {b} = ?",
    "{a}+{b}=",
    "What is {a}+{b}?",
    "What's {a} + {b}?",
    "Add {a} and {b}.",
    "Calculate {a} + {b}.",
    "Compute {a} + {b}.",
    "What is {a} plus {b}?",
    "How much is {a} + {b}?",
    "How much is {a} plus {b}?",
    "Please add {a} and {b}.",
    "Can you add {a} and {b}?",
    "Can you calculate {a} + {b}?",
    "What is the sum of {a} and {b}?",
    "Sum {a} and {b}.",
    "Tell me what {a} + {b} is.",
    "Could you compute {a} plus {b}, please?",
    "I have {a} {thing}s and buy {b} more. How many do I have now?",
    "{name} has {a} {thing}s and gets {b} more. How many {thing}s does {name} have?",
    "There are {a} {thing}s and {b} {other}s in the room. How many things are there in total?",
    "A {thing} costs {a} dollars and a {other} costs {b} dollars. What do they cost together?",
)

SUB_PROMPTS = (
    *("What is {a} - {b}?",) * 4,
    "{a} - {b}",
    "{a}-{b}",
    "{a} - {b} = ?",
    "Calculate {a} - {b}.",
    "Compute {a} - {b}.",
    "What is {a} minus {b}?",
    "How much is {a} - {b}?",
    "Subtract {b} from {a}.",
    "What is the difference between {a} and {b}?",
    "I have {a} {thing}s and give away {b}. How many are left?",
    "{name} has {a} {thing}s and loses {b}. How many {thing}s are left?",
)

MUL_PROMPTS = (
    *("What is {a} * {b}?",) * 2,
    *("What is {a} x {b}?",) * 2,
    "What is {a} times {b}?",
    "{a} * {b}",
    "{a}*{b}",
    "{a} × {b}",
    "How much is {a} times {b}?",
    "Multiply {a} by {b}.",
    "Calculate {a} * {b}.",
    "What is the product of {a} and {b}?",
    "What is {a} multiplied by {b}?",
)

ADD_MORE = (
    "Now add {b}.",
    "Add {b} to that.",
    "Plus {b}?",
    "And add {b}?",
    "And plus {b}?",
    "Add {b} to the result.",
)

SUB_MORE = ("Now subtract {b}.", "Subtract {b} from that.", "Minus {b}?", "Take away {b}.", "And minus {b}?")

COPY_PROMPTS = (
    "Repeat: {x}",
    "Repeat after me: {x}",
    "Copy this: {x}",
    "Copy this list: {x}",
    "Say: {x}",
    "Echo: {x}",
    "Please repeat: {x}",
    "Repeat this exactly: {x}",
    "Write this again: {x}",
)

REVERSE_PROMPTS = (
    "Reverse this list: {x}",
    "Reverse: {x}",
    "Write this list backwards: {x}",
    "Reverse the order: {x}",
    "Can you reverse this list: {x}",
)

UP_PROMPTS = (
    *("Sort these numbers: {x}",) * 3,
    *("Sort: {x}",) * 2,
    "Sort this list: {x}",
    "Sort {x}",
    "Please sort these numbers: {x}",
    "Can you sort these numbers: {x}",
    "Sort the numbers {x}.",
    "Sort these numbers in ascending order: {x}",
    "Sort from smallest to largest: {x}",
    "Put these numbers in order: {x}",
    "Order these numbers from smallest to largest: {x}",
)

DOWN_PROMPTS = (
    "Sort these numbers in descending order: {x}",
    "Sort in descending order: {x}",
    "Sort from largest to smallest: {x}",
    "Order these numbers from largest to smallest: {x}",
    "Sort these numbers, largest first: {x}",
)

EXTREME_PROMPTS = (
    "What is the {w} of {x}?",
    "What is the {w} number: {x}",
    "Which number is the {w}: {x}?",
    "Find the {w} number in {x}.",
)

ASK_CELL = (
    "What is the {title} of {key}?",
    "What is the {title} of {key}?",
    "What is {key}'s {title}?",
    "Look up the {title} of {key}.",
    "Tell me the {title} of {key}.",
    "{title} of {key}?",
)

ASK_MORE = (
    "And the {title} of {key}?",
    "And {key}'s {title}?",
    "What is the {title} of {key}?",
    "What about the {title} of {key}?",
)

ASK_KEY = (
    "Which {first} has the {title} {cell}?",
    "Which {first} has {title} {cell}?",
    "Whose {title} is {cell}?",
)

LEADS = (
    "",
    "Table:\n",
    "Here is a table:\n",
    "Given this table:\n",
    "Use this table:\n",
    "Look at this table.\n",
)

JSON_PROMPTS = (
    "Extract {keys} as JSON: {text}",
    "Extract {keys} as JSON from this text: {text}",
    "Extract {keys} as JSON.\n{text}",
    "{text}\nGive me {keys} as JSON.",
    "{text} Extract {keys} as JSON.",
    "Return JSON with {keys}: {text}",
    "Turn this into JSON with {keys}: {text}",
)

FIXED_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        GREETING,
        (
            "Hi",
            "Hello",
            "Hello!",
            "Hi!",
            "Hey",
            "Hi there!",
            "Hello there",
            "Good morning!",
            "Good evening.",
            "Good afternoon!",
            "Hey there!",
            "hello",
            "hi",
        ),
    ),
    (
        IDENTITY,
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Who is this?",
            "What's your name?",
            "Tell me who you are.",
            "Who am I talking to?",
            "Which model are you?",
            "Are you a robot?",
            "Introduce yourself.",
            "What model is this?",
            "Do you have a name?",
            "Are you ChatGPT?",
        ),
    ),
    (
        ABILITIES,
        (
            "What can you do?",
            "Help",
            "How can you help me?",
            "What are you good at?",
            "Help me.",
            "What do you know?",
            "What can I ask you?",
            "Can you help me?",
            "What are your skills?",
        ),
    ),
    (
        "I am fine, thank you.",
        (
            "How are you?",
            "How are you doing?",
            "How is it going?",
            "Are you ok?",
            "How do you do?",
            "How are you today?",
            "How do you feel?",
        ),
    ),
    (
        "You are welcome!",
        (
            "Thanks",
            "Thank you!",
            "Thank you very much.",
            "Thanks a lot!",
            "Great, thanks!",
            "Great!",
            "Well done!",
            "Perfect, thank you.",
            "Good job!",
            "Nice!",
        ),
    ),
    (
        UNKNOWN,
        (
            "What is the capital of France?",
            "Tell me a joke.",
            "Write a poem about the sea.",
            "Who is the president?",
            "What is the weather like?",
            "Translate hello to French.",
            "Write a story.",
            "Explain gravity.",
            "What is the meaning of life?",
            "Write Python code.",
            "Who won the game?",
            "Why is the sky blue?",
            "Sing a song.",
            "What time is it?",
            "Summarize this article.",
            "How do I cook rice?",
            "What is love?",
            "Tell me about Paris.",
            "What is a computer?",
            "Who was Einstein?",
            "Write an email to my boss.",
            "What is machine learning?",
            "How old is the universe?",
            "Tell me a story about a dragon.",
            "What should I eat today?",
            "Recommend a film.",
            "Explain quantum physics.",
            "How do planes fly?",
            "What is the square root of two?",
            "Where is Japan?",
            "Is it going to rain?",
            "Do you like music?",
            "Write a haiku.",
            "What is the news today?",
            "Why do cats sleep so much?",
            "Can you draw a picture?",
        ),
    ),
)

TELL_NAME = (
    "My name is {n}.",
    "I am {n}.",
    "I'm {n}.",
    "Hi, I am {n}.",
    "Hello, my name is {n}.",
    "Call me {n}.",
    "Hi! My name is {n}.",
    "Remember: my name is {n}.",
    "Please remember my name: {n}.",
    "Hello, I'm {n}.",
)

ASK_NAME = (
    "What is my name?",
    "What's my name?",
    "Do you remember my name?",
    "Who am I?",
    "Do you know my name?",
    "What was my name?",
    "Can you tell me my name?",
    "Say my name.",
)
