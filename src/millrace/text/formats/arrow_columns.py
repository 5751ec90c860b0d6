"""Columns of tables of pyarrow: which hold texts and ids, and their values."""

from __future__ import annotations

import contextlib
import uuid
from typing import Any, NamedTuple

from millrace.errors import TextError
from millrace.text.documents import Query


class Rows(NamedTuple):
    """Rows of a table.

    Attributes:
        columns: Values of each key: strings, lists of strings, or anything else that pyarrow
            holds, which is not a text.
        ids: Values of the id column: strings, numbers or None; None without one.
        share: Share of the range that has been read, 0 to 1.
    """

    columns: list[list[Any]]
    ids: list[Any] | None
    share: float


class TextColumns:
    """The columns of a table that hold the texts and the ids of documents.

    Args:
        schema: Schema of the table.
        query: Keys of the texts and the id: names of columns, or paths into struct columns.
        source: Path of the file, for messages.

    Attributes:
        names: Names and paths of all of them, each once.

    Raises:
        TextError: A table without a column for a key, or with one of another type.
    """

    def __init__(self, schema: Any, query: Query, source: str) -> None:
        for key in query.keys:
            _check_text_column(schema, key, source)
        self._keys = query.keys
        self._id_key = None if _type_of(schema, query.id_key) is None else query.id_key
        self.names = [*dict.fromkeys([*query.keys, *([self._id_key] if self._id_key else [])])]

    def rows(self, batch: Any, share: float) -> Rows:
        """The texts and ids of a record batch."""
        columns = [_values(_column(batch, key)) for key in self._keys]
        ids = _id_values(_column(batch, self._id_key)) if self._id_key else None
        return Rows(columns, ids, share)


def _type_of(schema: Any, key: str) -> Any:
    """The type of a column, or of what dots reach in a struct column; None if there is none."""
    import pyarrow

    if schema.names.count(key) == 1:
        return schema.field(key).type
    first, *rest = key.split(".")
    if schema.names.count(first) != 1:
        return None
    type_ = schema.field(first).type
    for name in rest:
        if not pyarrow.types.is_struct(type_) or type_.get_field_index(name) < 0:
            return None
        type_ = type_.field(name).type
    return type_


def _check_text_column(schema: Any, key: str, source: str) -> None:
    if schema.names.count(key) > 1:
        raise TextError(f'{source} has {schema.names.count(key)} columns "{key}"')
    type_ = _type_of(schema, key)
    if type_ is None:
        names = ", ".join(schema.names[:10]) or "none"
        raise TextError(
            f'{source} has no column "{key}"; its columns are: {names}. '
            "Name the text's column with --json-keys"
        )
    if not _is_text(type_):
        raise TextError(
            f'{source}: column "{key}" is {type_}, not a text or a list of texts. '
            "Name the text's column with --json-keys"
        )


def _is_text(type_: Any, is_list: bool = False) -> bool:
    import pyarrow
    from pyarrow import types

    if isinstance(type_, pyarrow.BaseExtensionType):
        type_ = type_.storage_type
    if types.is_dictionary(type_):
        type_ = type_.value_type
    lists = types.is_list(type_) or types.is_large_list(type_) or types.is_fixed_size_list(type_)
    if lists and not is_list:
        return _is_text(type_.value_type, True)
    return bool(
        types.is_string(type_)
        or types.is_large_string(type_)
        or types.is_binary(type_)
        or types.is_large_binary(type_)
        or types.is_null(type_)
        or "view" in str(type_)
    )


def _column(batch: Any, name: str) -> Any:
    if name in batch.schema.names:
        return batch.column(name)
    first, *rest = name.split(".")
    column = batch.column(first)
    for part in rest:
        # `flatten` gives the children null where their parent is null.
        column = column.flatten()[column.type.get_field_index(part)]
    return column


def _id_values(column: Any) -> list[Any]:
    """Values of an id column: times and decimals as Arrow's text for them, UUIDs in their usual
    form, other bytes as text or in hexadecimal, None of lists and structs."""
    import pyarrow
    from pyarrow import types

    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    if types.is_nested(column.type) or types.is_interval(column.type):
        return [None] * len(column)
    if types.is_temporal(column.type) or types.is_decimal(column.type):
        column = column.cast(pyarrow.string())  # Python's types have no nanoseconds
    if types.is_fixed_size_binary(column.type) and column.type.byte_width == 16:
        return [None if id_ is None else str(uuid.UUID(bytes=id_)) for id_ in column.to_pylist()]
    return [id_.hex() if isinstance(id_, bytes) else id_ for id_ in _values(column)]


def _values(column: Any) -> list[Any]:
    """The values of a column as Python's: str, or bytes where they are not UTF-8."""
    import pyarrow
    from pyarrow import types

    if isinstance(column.type, pyarrow.BaseExtensionType):
        column = column.storage
    try:
        column.validate(full=True)  # damaged offsets would lead anywhere in memory
    except pyarrow.ArrowInvalid as error:
        if "UTF8" not in str(error):
            raise
    if types.is_dictionary(column.type):
        column = column.dictionary_decode()
    with contextlib.suppress(pyarrow.ArrowException, UnicodeDecodeError):
        if types.is_string(column.type) or types.is_large_string(column.type):
            return column.to_numpy(zero_copy_only=False).tolist()  # type: ignore[no-any-return]
        return [_as_text(value) for value in column.to_pylist()]
    is_list = types.is_nested(column.type)
    binary = pyarrow.large_list(pyarrow.large_binary()) if is_list else pyarrow.large_binary()
    column = column.cast(binary)
    column.validate(full=True)  # of nested columns, only the first problem is known so far
    return [_as_text(value) for value in column.to_pylist()]


def _as_text(value: Any) -> Any:
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, list):
        return [_as_text(item) for item in value]
    return value
