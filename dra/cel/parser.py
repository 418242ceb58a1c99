"""Tokens to tree, with the places cel-go reports.

Source: the CEL grammar. The middle of `a ? b : c` may not hold another ternary without brackets; chains of `!` and of
`-` fold; a sign directly before a number belongs to the number. Nesting is limited to 250 levels.
One expression level takes three Python frames, so that the limit is reached before Python's own.
"""

from __future__ import annotations

import re

from dra.cel.errors import Issue
from dra.cel.lexer import BadLiteral, Token, tokenize, unescape, unescape_bytes
from dra.cel.macros import MacroError, expand
from dra.cel.tree import Call, Ident, ListNode, Literal, MapNode, Node, Select, StructNode
from dra.cel.values import MAX_INT, MAX_UINT, MIN_INT, Uint

MAX_DEPTH = 250
TOO_DEEP = f"expression recursion limit exceeded: {MAX_DEPTH}"
_RESERVED = frozenset(
    {
        "as", "break", "const", "continue", "else", "for", "function", "if", "import", "let", "loop", "package",
        "namespace", "return", "var", "void", "while",
    }
)  # fmt: skip
# Operator -> (precedence, function name). Higher binds tighter.
_BINARY = {
    "||": (1, "_||_"), "&&": (2, "_&&_"),
    "<": (3, "_<_"), "<=": (3, "_<=_"), ">": (3, "_>_"), ">=": (3, "_>=_"), "==": (3, "_==_"), "!=": (3, "_!=_"),
    "in": (3, "@in"), "+": (4, "_+_"), "-": (4, "_-_"), "*": (5, "_*_"), "/": (5, "_/_"), "%": (5, "_%_"),
}  # fmt: skip
_HUGE = 400  # digits; no literal of more is in range


class _Stop(Exception):  # noqa: N818 - ends the parse; the problem is already noted
    pass


def parse(source: str) -> tuple[Node | None, tuple[Issue, ...]]:
    """Give the tree of `source` and every problem found, ordered by place; a tree only without problems."""
    tokens, problems = tokenize(source)
    parser = _Parser(tokens, problems)
    node: Node | None = None
    try:
        node = parser.whole()
    except _Stop:
        pass
    except RecursionError:
        parser.too_deep = TOO_DEEP
    if parser.too_deep:
        return None, (Issue(-1, 0, parser.too_deep),)
    if parser.problems:
        return None, place(source, parser.problems)
    return node, ()


def place(source: str, problems: list[tuple[int, str]]) -> tuple[Issue, ...]:
    """Turn offsets into lines and columns, ordered by place."""
    issues = []
    for at, message in sorted(problems, key=lambda problem: problem[0]):
        line = source.count("\n", 0, at) + 1
        issues.append(Issue(line, at - (source.rfind("\n", 0, at) + 1) + 1, message))
    return tuple(issues)


class _Parser:
    def __init__(self, tokens: list[Token], problems: list[tuple[int, str]]) -> None:
        self.tokens = tokens
        self.problems = problems
        self.index = 0
        self.depth = 0
        self.too_deep = ""

    def whole(self) -> Node:
        node = self.expression()
        if self.token.kind != "eof":
            self.unexpected("extraneous input", "expecting <EOF>")
        return node

    # -- tokens

    @property
    def token(self) -> Token:
        return self.tokens[self.index]

    def take(self, kind: str) -> Token | None:
        token = self.tokens[self.index]
        if token.kind != kind:
            return None
        self.index += 1
        return token

    def need(self, kind: str) -> Token:
        token = self.take(kind)
        if token is None:
            self.unexpected("mismatched input", f"expecting '{kind}'")
        assert token is not None
        return token

    def unexpected(self, what: str, expecting: str) -> None:
        token = self.token
        self.problems.append((token.at, f"Syntax error: {what} '{token.text}' {expecting}"))
        raise _Stop

    def end_of(self, node: Node, start: int) -> Node:
        """Note the stretch of text a node came from."""
        last = self.tokens[self.index - 1]
        node.start, node.end = start, last.at + len(last.text)
        return node

    def nest(self, node: Node, *parts: Node, by: int = 0) -> Node:
        """Note how deeply operators nest below a node; too deep ends the parse."""
        node.depth = max([part.depth for part in parts], default=0) + by
        if node.depth > MAX_DEPTH:
            self.too_deep = "max recursion depth exceeded"
            raise _Stop
        return node

    # -- grammar

    def expression(self, *, ternary: bool = True) -> Node:
        """expr: conditionalOr ('?' conditionalOr ':' expr)?"""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.too_deep = TOO_DEEP
            raise _Stop
        start = self.token.at
        node = self.binary()
        question = self.take("?") if ternary else None
        if question is not None:
            then = self.expression(ternary=False)
            self.need(":")
            otherwise = self.expression()
            parts = [node, then, otherwise]
            node = self.end_of(self.nest(Call(question.at, "_?_:_", parts), *parts, by=1), start)
        self.depth -= 1
        return node

    def binary(self) -> Node:
        """Operators by precedence, with an explicit stack: all are left-associative."""
        operands = [self.operand()]
        operators: list[tuple[int, str, int]] = []
        while True:
            entry = _BINARY.get(self.token.kind)
            level = entry[0] if entry else 0
            while operators and operators[-1][0] >= level:
                self.reduce(operands, operators)
            if entry is None:
                return operands[0]
            operators.append((level, entry[1], self.token.at))
            self.index += 1
            operands.append(self.operand())

    def reduce(self, operands: list[Node], operators: list[tuple[int, str, int]]) -> None:
        level, name, at = operators.pop()
        right, left = operands.pop(), operands.pop()
        if level <= 2 and isinstance(left, Call) and left.name == name and left.target is None:
            # Long chains of && and || stay flat: one call with many terms decides the same.
            chain = Call(left.at, name, [*left.args, right])
            chain.start, chain.end = left.start, right.end
            operands.append(self.nest(chain, left, right))
            return
        node = Call(at, name, [left, right])
        node.start, node.end = left.start, right.end
        operands.append(self.nest(node, left, right, by=int(level > 2)))

    def operand(self) -> Node:
        """Unary and member: `!x`, `-x`, a primary and what follows it."""
        start = self.token.at
        sign = self.token
        folds = 0
        if sign.kind == "!" or (
            sign.kind == "-" and self.tokens[self.index + 1].kind not in {"int", "double"}
        ):
            while self.token.kind == sign.kind:
                self.index += 1
                folds += 1
        member_start = self.token.at
        token = self.token
        if token.kind == "(":
            self.index += 1
            node = self.expression()
            self.need(")")
            self.end_of(node, member_start)
        elif token.kind == "[":
            node = self.list_literal()
        elif token.kind == "{":
            node = self.map_literal()
        elif token.kind in {"ident", "."}:
            node = self.name()
        else:
            node = self.literal()
        while True:
            token = self.token
            if token.kind == ".":
                node = self.member(node)
            elif token.kind == "[":
                self.index += 1
                optional = self.take("?")
                index = self.expression()
                self.need("]")
                name = "_[?_]" if optional else "_[_]"
                node = self.nest(Call(token.at, name, [node, index]), node, index, by=1)
            else:
                break
            self.end_of(node, member_start)
        if folds % 2:
            name = "!_" if sign.kind == "!" else "-_"
            node = self.end_of(self.nest(Call(start, name, [node]), node), start)
        return node

    def name(self) -> Node:
        """An identifier, a global call, or a message literal."""
        start = self.token.at
        dot = "." if self.take(".") else ""
        token = self.token
        if token.kind != "ident":
            self.unexpected("no viable alternative at input", "expecting IDENTIFIER")
        message = self.message_name()
        if message is not None:
            return self.struct(dot + message, start)
        self.index += 1
        if token.text in _RESERVED:
            self.problems.append((token.at, f"reserved identifier: {token.text}"))
        bracket = self.take("(")
        if bracket is None:
            return self.end_of(Ident(start, dot + token.text), start)
        args = self.arguments()
        node = self.macro(bracket.at, token.text, None, args) if not dot else None
        return self.end_of(self.nest(node or Call(bracket.at, dot + token.text, args), *args), start)

    def member(self, operand: Node) -> Node:
        dot = self.need(".")
        optional = self.take("?")
        token = self.token
        if token.kind == "quoted":
            self.problems.append((token.at, "unsupported syntax: '`'"))
        elif token.kind != "ident":
            self.unexpected("mismatched input", "expecting IDENTIFIER")
        self.index += 1
        if optional is not None:
            field = Literal(token.at, token.text)
            return self.nest(Call(dot.at, "_?._", [operand, field]), operand, by=1)
        bracket = self.take("(") if token.kind == "ident" else None
        if bracket is None:
            return self.nest(Select(dot.at, operand, token.text), operand, by=1)
        args = self.arguments()
        node = self.macro(bracket.at, token.text, operand, args)
        return self.nest(node or Call(bracket.at, token.text, args, operand), operand, *args, by=1)

    def macro(self, at: int, name: str, target: Node | None, args: list[Node]) -> Node | None:
        try:
            return expand(at, name, target, args)
        except MacroError as error:
            self.problems.append((error.at, error.message))
            return Literal(at, None)

    def arguments(self) -> list[Node]:
        args: list[Node] = []
        if self.take(")"):
            return args
        while True:
            args.append(self.expression())
            if not self.take(","):
                break
        self.need(")")
        return args

    def message_name(self) -> str | None:
        """The dotted name of a message literal, if `{` follows it; consumes nothing otherwise."""
        index = self.index
        parts = [self.tokens[index].text]
        while self.tokens[index + 1].kind == "." and self.tokens[index + 2].kind == "ident":
            index += 2
            parts.append(self.tokens[index].text)
        if self.tokens[index + 1].kind != "{":
            return None
        self.index = index + 1
        return ".".join(parts)

    def struct(self, name: str, start: int) -> Node:
        brace = self.need("{")
        fields: list[tuple[int, str, Node, bool]] = []
        while self.token.kind != "}":
            optional = self.take("?") is not None
            token = self.token
            if token.kind not in {"ident", "quoted"}:
                self.unexpected("mismatched input", "expecting IDENTIFIER")
            self.index += 1
            colon = self.need(":")
            fields.append((colon.at, token.text, self.expression(), optional))
            if not self.take(","):
                break
        self.need("}")
        return self.end_of(
            self.nest(StructNode(brace.at, name, fields), *[field[2] for field in fields]), start
        )

    def list_literal(self) -> Node:
        start = self.need("[").at
        elements: list[Node] = []
        optional: set[int] = set()
        while self.token.kind != "]":
            if self.take("?"):
                optional.add(len(elements))
            elements.append(self.expression())
            if not self.take(","):
                break
        self.need("]")
        return self.end_of(self.nest(ListNode(start, elements, frozenset(optional)), *elements), start)

    def map_literal(self) -> Node:
        start = self.need("{").at
        entries: list[tuple[Node, Node, bool]] = []
        while self.token.kind != "}":
            optional = self.take("?") is not None
            key = self.expression()
            self.need(":")
            entries.append((key, self.expression(), optional))
            if not self.take(","):
                break
        self.need("}")
        parts = [part for key, value, _ in entries for part in (key, value)]
        return self.end_of(self.nest(MapNode(start, entries), *parts), start)

    def literal(self) -> Node:
        start = self.token.at
        sign = "-" if self.take("-") else ""
        token = self.token
        try:
            value = _value(token, sign)
        except BadLiteral as error:
            self.problems.append((start, str(error)))
            value = None
        except KeyError:
            self.unexpected("mismatched input", "expecting a value")
        self.index += 1
        return self.end_of(Literal(start, value), start)


def _value(token: Token, sign: str) -> object:
    """Give the value of a literal.

    Raises:
        KeyError: the token is no literal.
        BadLiteral: it is out of range.
    """
    match token.kind:
        case "int":
            number = -_integer(token.text) if sign else _integer(token.text)
            if not MIN_INT <= number <= MAX_INT:
                raise BadLiteral("invalid int literal")
            return number
        case "uint":
            number = _integer(token.text[:-1])
            if number > MAX_UINT:
                raise BadLiteral("invalid uint literal")
            return Uint(number)
        case "double":
            value = float(sign + token.text)
            if value in {float("inf"), float("-inf")}:
                raise BadLiteral("invalid double literal")
            return value
        case "string":
            return unescape(token.text)
        case "bytes":
            return unescape_bytes(token.text)
    return {"true": True, "false": False, "null": None}[token.kind]


def _integer(text: str) -> int:
    digits = re.sub(r"^0+(?=.)", "", text.removeprefix("0x"))
    return MAX_UINT + 1 if len(digits) > _HUGE else int(digits, 16 if text.startswith("0x") else 10)
