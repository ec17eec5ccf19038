"""Answers for debug-gym's tasks that no model gave: an agent that looks around, tries a fix that is
not enough, and then the one that is.

They are sent in place of what a model says, so that the whole loop runs where no model can solve
the tasks. Each is a turn as debug-gym gets it: a thought and one tool call.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Turn:
    """What the agent says and does."""

    thought: str
    tool: str
    arguments: dict[str, Any] = field(default_factory=dict)


def _bash(thought: str, command: str) -> Turn:
    return Turn(thought, "bash", {"command": command})


def _view(thought: str, path: str) -> Turn:
    return Turn(thought, "view", {"path": path})


def _pdb(thought: str, command: str) -> Turn:
    return Turn(thought, "pdb", {"command": command})


def _edit(thought: str, path: str, start: int, end: int, code: str) -> Turn:
    return Turn(thought, "edit", {"path": path, "start": start, "end": end, "new_code": code})


def _tests(thought: str) -> Turn:
    return Turn(thought, "eval")


def _look(code: str) -> list[Turn]:
    """How every one begins."""
    return [
        _bash("I will see which files there are.", "ls -la && wc -l *.py"),
        _view("I will read the code.", code),
        _view("Now the tests, to see what is expected.", "test.py"),
        _tests("I will run the tests before I change anything."),
    ]


def _config() -> list[Turn]:
    file = "config_code.py"
    return [
        *_look(file),
        _bash("Where is the cache used?", f"grep -n _cache {file} test.py"),
        _bash(
            "I will see whether a new value is found.",
            "python -c \"from config_code import ConfigManager as C; c = C({'a': {'b': 1}}); "
            "print(c.a.b); c.set('a', {'b': 2}); print(c.a.b, C._cache)\"",
        ),
        _edit(
            "A value that was set must leave the cache.",
            file,
            36,
            37,
            "    def set(self, name, value):\n"
            "        self._cache.pop(name, None)\n"
            "        self._config[name] = value",
        ),
        _tests("I will run the tests again."),
        _bash(
            "Two managers seem to share something.",
            "python -c \"from config_code import ConfigManager as C; a = C({'x': {'h': 1}}); "
            "b = C({'x': {'h': 2}}); print(a.x.h, b.x.h, a._cache is b._cache)\"",
        ),
        _view("The cache belongs to the class. I will look at the constructor.", file),
        _edit(
            "Each manager gets a cache of its own.",
            file,
            5,
            6,
            "    def __init__(self, config_dict=None):\n"
            "        self._cache = {}\n"
            "        self._config = config_dict or {}",
        ),
        _tests("That should be all."),
    ]


def _counter() -> list[Turn]:
    file = "counter_code.py"
    return [
        *_look(file)[:3],
        _bash(
            "I will run the tests, but only count what they print.",
            "python -m pytest -q --tb=line test.py 2>&1 | grep -v '^Thread' | tail -15",
        ),
        _bash(
            "How many increments are lost with few threads?",
            'python -c "import threading as t; from counter_code import *; '
            "c = ThreadSafeCounter(); "
            "a = [t.Thread(target=increment_counter, args=(c, 5)) for _ in range(3)]; "
            '[x.start() for x in a]; [x.join() for x in a]; print(c.get_count(), 15)"',
        ),
        _edit(
            "It gives up when another thread was faster. I will write the value anyway.",
            file,
            27,
            28,
            "            # Write the value in any case\n            if True:",
        ),
        _bash(
            "Does it count all of them now?",
            "python -m pytest -q --tb=line test.py 2>&1 | grep -v '^Thread' | tail -8",
        ),
        _view("Still lost: the value is read before the pause and written after it.", file),
        _edit(
            "Reading and writing belong under one lock.",
            file,
            18,
            33,
            "        with self._lock:\n"
            "            self._active_threads += 1\n"
            "            local_value = self._count\n"
            "            self._count = local_value + 1\n"
            "            self._increment_history.append(\n"
            "                (threading.get_ident(), local_value, self._count)\n"
            "            )\n"
            "            self._active_threads -= 1",
        ),
        _tests("I will run the tests again."),
    ]


def _grader() -> list[Turn]:
    file = "grader_code.py"
    return [
        *_look(file),
        _bash(
            "Who is among the best, and should not be?",
            'python -c "import test; t = test.TestGradeProcessor(); t.setUp(); '
            'print(t.processor.get_top_performers(90.0))"',
        ),
        _bash("What does the docstring ask for?", f"sed -n 17,22p {file}"),
        _edit(
            "Perhaps the threshold itself should not count.",
            file,
            35,
            35,
            "            if all(grade > threshold for grade in grades)",
        ),
        _tests("I will run the tests."),
        _bash("No better. Who is in how many classes?", "grep -n 'student[0-9]' test.py"),
        _view("student4 is in one class of two, so incomplete. I will read it again.", file),
        _edit(
            "A student must have a grade in each class.",
            file,
            35,
            35,
            "            if len(grades) == len(self.class_data)\n"
            "            and all(grade >= threshold for grade in grades)",
        ),
        _tests("I will run the tests again."),
    ]


def _patcher() -> list[Turn]:
    file = "patcher_code.py"
    return [
        *_look(file),
        _bash("The text that the tests patch.", "cat -A source_code.txt | cut -c1-40"),
        _bash(
            "What comes of line 0?",
            'python -c "from patcher_code import Patcher; p = Patcher(); '
            "print(p.parse_line_numbers('0'), p.parse_line_numbers('4:1'))\"",
        ),
        _edit(
            "Line 0 must be refused.",
            file,
            30,
            31,
            "            tail = int(line_numbers[1]) - 1  # 1-based to 0-based\n"
            "        if head < 0:\n"
            '            return "SyntaxError: invalid syntax.", None, None\n'
            '        return "", head, tail',
        ),
        _tests("I will run the tests."),
        _bash("One is left: the range that ends before it begins.", f"sed -n 17,40p {file}"),
        _edit(
            "That is refused, too.",
            file,
            31,
            31,
            "        if head < 0 or tail < head:",
        ),
        _tests("I will run the tests again."),
    ]


def _purr() -> list[Turn]:
    file = "purr_code.py"
    return [
        *_look(file),
        _bash(
            "How hungry is the cat at each step?",
            "python -c \"from purr_code import Cat; c = Cat('N'); "
            '[print(i, c.hunger, c.step()) for i in range(10)]" | tail -10',
        ),
        _edit(
            "Perhaps it becomes hungry too slowly.",
            file,
            23,
            23,
            "        self.hunger += 6",
        ),
        _tests("I will run the tests."),
        _edit("No. I will take that back.", file, 23, 23, "        self.hunger += 5"),
        _bash("The conditions again.", f"sed -n 25,36p {file}"),
        _edit(
            "More than 20 is also more than 10, so the second case is never reached.",
            file,
            27,
            32,
            "        if self.hunger > 20:\n"
            "            result = self.intense_meow()\n"
            '            self.feed("meat")\n'
            "        elif self.hunger > 10:\n"
            "            result = self.meow()\n"
            '            self.feed("fish")',
        ),
        _tests("I will run the tests again."),
    ]


def _scientific_calculator() -> list[Turn]:
    file = "scientific_calculator_code.py"
    return [
        *_look(file),
        _view("The base class.", "scientific_calculator_tool.py"),
        _bash(
            "What is the action?",
            'python -c "from scientific_calculator_code import PlusTool as P; '
            "print(repr(P().action), repr(P().action_str), P().use('```plus 1 2```'))\"",
        ),
        _edit(
            "It splits at action, which is not set; action_str is.",
            file,
            20,
            20,
            '            numbers = input_text.split(self.action_str)[1].split("```")[0].strip()',
        ),
        _tests("I will run the tests."),
        _bash(
            "What about three numbers?",
            'python -c "from scientific_calculator_code import PlusTool as P; '
            "P().use('```plus 1 2 3```')\"",
        ),
        _view("The numbers are counted outside of the try.", file),
        _edit(
            "They belong inside.",
            file,
            20,
            23,
            '            numbers = input_text.split(self.action_str)[1].split("```")[0].strip()\n'
            "            number_1, number_2 = numbers.split()\n"
            "        except (IndexError, ValueError):\n"
            '            return "SyntaxError: invalid syntax."',
        ),
        _tests("I will run the tests again."),
    ]


def _shopping_cart() -> list[Turn]:
    file = "shopping_cart_code.py"
    return [
        *_look(file),
        _bash(
            "What is the total at the end?",
            'python -c "from shopping_cart_code import ShoppingCart as S; c = S(); '
            "c.add_item('apple', 1.0, 2); c.apply_discount('apple', 20); print(c.get_total()); "
            "c.add_item('apple', 1.0, 3); print(c.get_total())\"",
        ),
        _pdb("I will stop where items are added.", f"b {file}:9"),
        _pdb("And run there.", "c"),
        _edit(
            "Items that come later must cost less, too.",
            file,
            15,
            15,
            "        self.total += price * quantity * (1 - self.discounts.get(item, 0) / 100)",
        ),
        _tests("I will run the tests."),
        _bash(
            "Off by a cent? I will see all digits.",
            "python -c \"import test; c = test.ShoppingCart(); c.add_item('a', 1.0, 2); "
            "c.add_item('o', 0.75, 5); c.apply_discount('a', 20); c.apply_discount('o', 10); "
            "c.add_item('a', 1.0, 3); c.add_item('o', 0.75, 2); print(repr(c.total))\"",
        ),
        _view("The total is summed up in steps, and each rounds. I will read it again.", file),
        _edit(
            "It can be computed when it is asked for.",
            file,
            23,
            24,
            "    def get_total(self):\n"
            "        total = sum(\n"
            "            self.item_prices[item] * n * (1 - self.discounts.get(item, 0) / 100)\n"
            "            for item, n in self.items.items()\n"
            "        )\n"
            "        return round(total, 2)",
        ),
        _tests("I will run the tests again."),
    ]


def _sum_tree() -> list[Turn]:
    file = "sum_tree_code.py"
    return [
        *_look(file),
        _bash(
            "Where does it end?",
            'python -c "import test; test.test_shopping_cart()" 2>&1 | tail -4',
        ),
        _bash("Which nodes refer to which?", "grep -n 'set_left\\|set_right' test.py"),
        _edit(
            "node5 leads back to node2. I will mark nodes that were summed.",
            file,
            14,
            22,
            "def build_sum_tree(root):\n"
            "    if not root or root.sum:\n"
            "        return 0\n"
            "\n"
            "    root.sum = root.value\n"
            "    root.sum += build_sum_tree(root.left) + build_sum_tree(root.right)\n"
            "    return root.sum",
        ),
        _tests("I will run the tests."),
        _bash(
            "Summed, but what about the printing?",
            'python -c "import test; test.test_shopping_cart()" 2>&1 | tail -3',
        ),
        _view("It walks in circles as well.", file),
        _edit(
            "It must not visit a node twice.",
            file,
            23,
            29,
            "def print_tree(node, level=0, seen=None):\n"
            "    seen = set() if seen is None else seen\n"
            "    output = []\n"
            "    if node and node not in seen:\n"
            "        seen.add(node)\n"
            '        output.append(f"Value: {node.value}, Sum: {node.sum}")\n'
            "        output += print_tree(node.left, level + 1, seen)\n"
            "        output += print_tree(node.right, level + 1, seen)\n"
            "    return output",
        ),
        _tests("I will run the tests again."),
    ]


def _tomorrow_date() -> list[Turn]:
    file = "tomorrow_date_code.py"
    return [
        *_look(file),
        _bash(
            "Which dates are wrong?",
            'python -c "from tomorrow_date_code import TomorrowDate as T; t = T(); '
            "[print(d, t.tomorrow(d)) for d in ('2025-02-28', '2024-02-28', '2024-02-29', "
            "'2025-12-31', '2025-00-24')]\"",
        ),
        _bash("The day after the last of a February is missing.", f"sed -n 17,28p {file}"),
        _edit(
            "I will let the end of February always lead to March.",
            file,
            21,
            24,
            "                return datetime(year, month + 1, 1).date()",
        ),
        _tests("I will run the tests."),
        _edit(
            "Not that one. Back to what it was.",
            file,
            21,
            21,
            "                if year % 4 == 0:\n"
            "                    return datetime(year, month, day + 1).date()\n"
            "                else:\n"
            "                    return datetime(year, month + 1, 1).date()",
        ),
        _bash("And what happens on the 29th?", f"sed -n 17,28p {file}"),
        _edit(
            "It is the 29th that needs a case of its own.",
            file,
            25,
            26,
            "            elif day == 29:\n"
            "                return datetime(year, month + 1, 1).date()\n"
            "            else:\n"
            "                return datetime(year, month, day + 1).date()",
        ),
        _tests("I will run the tests again."),
    ]


SCRIPTS: dict[str, tuple[Turn, ...]] = {
    "config": tuple(_config()),
    "counter": tuple(_counter()),
    "grader": tuple(_grader()),
    "patcher": tuple(_patcher()),
    "purr": tuple(_purr()),
    "scientific_calculator": tuple(_scientific_calculator()),
    "shopping_cart": tuple(_shopping_cart()),
    "sum_tree": tuple(_sum_tree()),
    "tomorrow_date": tuple(_tomorrow_date()),
}
"""By task: all that need no network."""
