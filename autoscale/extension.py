"""Classes of one's own that a configuration names: found, checked, and their settings validated (pure, but it imports).

A policy or a collector of one's own is an *extension*. Its ``kind`` is an import path, ``package.module:Class``, or the
name of an entry point. Only such a kind is ever imported. Every door (validation, build, coordinator, simulator,
replay) reads a configuration strictly: it loads the class and validates its settings. Messages between running
processes are read with the context ``DEFERRED``: they passed a door before, and a process that lacks the class must
still be able to read them.
"""

import importlib
import re
import textwrap
import traceback
from asyncio import CancelledError
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Any, Union, get_args

from pydantic import (
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    GetJsonSchemaHandler,
    TypeAdapter,
    ValidationError,
    ValidationInfo,
)
from pydantic_core import CoreSchema, core_schema

from autoscale.documents import first_fault
from kvtransfer.strict_config import StrictConfig

# Context of pydantic with which an extension's class is not loaded, and its settings stay as they are.
DEFERRED = {"loads_extensions": False}
# Longest text of an error in a message, characters: an error may quote a whole data set.
_ERROR_CHARS = 300

_IMPORT_PATH = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)*:[A-Za-z_]\w*")
_WHERE_TO_PUT_IT = (
    "install its package on every node, or put its folder into PYTHONPATH before Ray starts; the runtime_env of an "
    "application does not reach Serve's controller"
)


class Extension(StrictConfig):
    """A class of your own: its import path, or the name of its entry point, and the fields of its config class."""

    model_config = ConfigDict(extra="allow")

    kind: str


class ExtensionError(ValueError):
    """An extension that cannot be loaded; the message names it."""


def error_text(error: BaseException) -> str:
    """Type and message of an error in one short line, also if its message cannot be made."""
    if isinstance(error, ValidationError):  # its own last line is a link
        text = f"ValidationError: {first_fault(error)}"
    else:
        text = traceback.format_exception_only(error)[-1]
    return storable(textwrap.shorten(text, _ERROR_CHARS, placeholder=" ..."))


def storable(text: str) -> str:
    """The text as UTF-8 can hold it: a half of a character, as in the name of an odd file, is written as its number."""
    return text.encode(errors="backslashreplace").decode()


@dataclass(frozen=True, slots=True, kw_only=True)
class ExtensionPoint:
    """A section of the configuration that may name an extension.

    Attributes:
        noun: name of the section, for messages.
        group: group of its entry points.
        base: class from which every extension is derived. Its attribute ``config_class`` names the settings' class.
        config_base: class from which every settings' class is derived.
    """

    noun: str
    group: str
    base: type[Any]
    config_base: type[StrictConfig]

    def is_named(self, kind: str) -> bool:
        """Whether a kind is an import path, or the name of an installed entry point."""
        return ":" in kind or kind in self.names()

    def names(self) -> list[str]:
        """Names of the installed entry points."""
        return sorted({point.name for point in entry_points(group=self.group)})

    def load(self, kind: str) -> type[Any]:
        """The class of a kind.

        Raises:
            ExtensionError: it cannot be imported, or is no class of this point with a class for its settings.
        """
        found = self._imported(kind)
        title = f"{self.noun} {kind}"
        if not isinstance(found, type) or not issubclass(found, self.base):
            raise ExtensionError(f"{title} is no {self.base.__name__}: derive it from {_path(self.base)}")
        missing = sorted(getattr(found, "__abstractmethods__", ()))
        if missing:
            raise ExtensionError(f"{title} lacks the method {missing[0]}")
        config_class = getattr(found, "config_class", None)
        if not isinstance(config_class, type) or not issubclass(config_class, self.config_base):
            raise ExtensionError(
                f"{title} has no config class: set its attribute config_class to a class derived from "
                f"{_path(self.config_base)}, got {config_class!r:.80}"
            )
        field = config_class.model_fields.get("kind")
        if field is None or field.annotation is not str:
            raise ExtensionError(f"{title}: its config class {config_class.__name__} needs the field `kind: str`")
        return found

    def settings(self, extension: Extension) -> tuple[type[Any], Any]:
        """The class of an extension, and its validated settings.

        Raises:
            ExtensionError: as ``load``.
            ValidationError: a setting is wrong; it has the path of each field.
        """
        found = self.load(extension.kind)
        try:
            return found, found.config_class.model_validate({"kind": extension.kind, **(extension.model_extra or {})})
        except ValidationError:
            raise
        except (Exception, SystemExit, CancelledError) as error:  # a validator of the extension's own
            raise ExtensionError(
                f"{self.noun} {extension.kind}: its config class raised {error_text(error)}"
            ) from error

    def _imported(self, kind: str) -> Any:
        if ":" not in kind:
            points = [point for point in entry_points(group=self.group) if point.name == kind]
            if not points:
                raise ExtensionError(
                    f"{self.noun} {kind} is no entry point of the group {self.group} in this process: "
                    f"{_WHERE_TO_PUT_IT}"
                )
            path = points[0].value
        elif _IMPORT_PATH.fullmatch(path := kind) is None:
            raise ExtensionError(f"{self.noun} {kind} is no import path: write package.module:Class")
        module_name, _, class_name = path.partition(":")
        try:
            module = importlib.import_module(module_name)
        except (Exception, SystemExit, CancelledError) as error:  # the module runs its own code
            hint = f": {_WHERE_TO_PUT_IT}" if isinstance(error, ImportError) else ""
            raise ExtensionError(f"{self.noun} {kind} cannot be imported: {error_text(error)}{hint}") from error
        if not hasattr(module, class_name):
            raise ExtensionError(f"{self.noun} {kind}: module {module_name} has no class {class_name}")
        return getattr(module, class_name)


@dataclass(frozen=True, slots=True)
class Extensible:
    """Annotation of a union of sections that differ in ``kind``, with ``Extension`` among them.

    A built-in kind is validated, dumped and described as in a union without ``Extension``. An extension is stored as
    plain values: the dump of its validated settings, so that defaults and files are read once, at the door.
    """

    point: ExtensionPoint

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """The union of all sections; a kind is validated by its own section alone, so that errors name no others."""
        sections = [each for each in get_args(source) if each is not Extension]
        built_in: Any = Annotated[Union[tuple(sections)], Field(discriminator="kind")]  # noqa: UP007 (a union of a list)
        adapter: TypeAdapter[Any] = TypeAdapter(built_in)
        kinds = {kind for each in sections for kind in get_args(each.model_fields["kind"].annotation)}

        def validated(value: Any, info: ValidationInfo) -> Any:
            document = value.model_dump() if isinstance(value, Extension) else value
            kind = document.get("kind") if isinstance(document, Mapping) else None
            is_deferred = info.context == DEFERRED
            if not isinstance(kind, str) or kind in kinds or not (is_deferred or self.point.is_named(kind)):
                return adapter.validate_python(value, context=info.context)
            extension = Extension.model_validate(document)
            return extension if is_deferred else self._dumped(extension)

        union = core_schema.union_schema([handler.generate_schema(built_in), handler.generate_schema(Extension)])
        return core_schema.with_info_wrap_validator_function(lambda value, _, info: validated(value, info), union)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        """The schema of the built-in sections, or an object with the kind of an extension and any other fields."""
        kinds: list[dict[str, Any]] = [{"pattern": f"^{_IMPORT_PATH.pattern}$"}]
        if names := self.point.names():
            kinds.append({"enum": names})
        extension = {
            "type": "object",
            "description": Extension.__doc__,
            "properties": {"kind": {"type": "string", "anyOf": kinds}},
            "required": ["kind"],
        }
        whole = handler(schema)
        built_in, _ = whole["anyOf"]
        return {**whole, "anyOf": [built_in, extension]}

    def _dumped(self, extension: Extension) -> Extension:
        _, settings = self.point.settings(extension)
        try:
            return Extension.model_validate(settings.model_dump(mode="json"))
        except Exception as error:
            raise ExtensionError(
                f"{self.point.noun} {extension.kind}: its settings cannot be stored as JSON: {error_text(error)}"
            ) from error


def _path(found: type[Any]) -> str:
    return f"{found.__module__}.{found.__qualname__}"
