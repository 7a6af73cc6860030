# SPDX-License-Identifier: Apache-2.0
"""Files of rows: CSV as Python's csv module reads it, gzip as zlib does, text by lines and paragraphs, and other files named."""

import csv
import gzip
import io
import itertools
import json
import random
import zlib

import conftest
import pytest
from data_probe import DataProbe, ProbeError


@pytest.fixture(scope="module")
def probe():
    out = DataProbe(conftest.BUILD)
    yield out
    out.close()


@pytest.fixture
def read(probe, tmp_path):
    """read(name, bytes) → (rows, lines, blank lines)."""

    def call(name, raw, **options):
        path = tmp_path / name
        path.write_bytes(raw)
        got = probe.ask("rows", path=str(path), **options)
        return [json.loads(row) for row in got["rows"]], got["lines"], got["blank_lines"]

    return call


def test_lists_of_ids_hold_what_json_says_whatever_is_in_them(read):
    lists = [
        [], [0], [1, 2, 3], [2**31 - 1, 0], [-(2**31), -100, 5], [2**31], [1, 2**31], [-(2**31) - 1], [1, -(2**33)], [2**63], [1, 2.5, 3],
        [1, "a", 2], [1, None], [True, 1], [1, [2, [3]], 4], [[1], 2], [1, {"labels": [3, 4]}, 5], [{"a": 1}], [[]], [-1, -1.0, 1e5],
    ]  # fmt: skip
    rows = [{"input_ids": ids, "labels": ids[::-1], "other": ids} for ids in lists]
    rows += [
        {"row": {"labels": [1, 2]}},
        {"input_ids": 7},
        {"attention_mask": [1, 1.0], "text": "[1,2]"},
        {"labels": {"a": [1, 2]}},
    ]
    got, _, _ = read("rows.jsonl", "\n".join(map(json.dumps, rows)).encode())
    assert json.dumps(got) == json.dumps(rows)


# --- gzip


def gunzip(probe, packed, step=1000):
    return bytes.fromhex(probe.ask("gunzip", bytes=packed.hex(), step=step))


def zlib_gunzip(packed):
    """All members of a gzip file, by zlib. @raises zlib.error for whatever zlib does not accept, the end of the file included."""
    out, first = b"", True
    while first or packed.lstrip(b"\0"):
        packed = packed if first else packed.lstrip(b"\0")
        member = zlib.decompressobj(wbits=31)
        out += member.decompress(packed)
        if not member.eof:
            raise zlib.error("cut off")
        packed, first = member.unused_data, False
    return out


def some_bytes(rng):
    """Random, repetitive, text-like or empty, up to 300 KB: past the window of 32 KiB and past one piece."""
    size = rng.choice([0, 1, 2, 100, 5000, 33_000, 70_000, 300_000])
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(size)
    if kind == 1:
        return (rng.randbytes(rng.randint(1, 40)) * size)[:size]
    words = [rng.randbytes(rng.randint(1, 12)) for _ in range(50)]
    text = b" ".join(rng.choices(words, k=size // 6 + 1))[:size]
    return text if kind == 2 else text + rng.randbytes(size // 10) + text


STRATEGIES = [zlib.Z_DEFAULT_STRATEGY, zlib.Z_FILTERED, zlib.Z_HUFFMAN_ONLY, zlib.Z_RLE, zlib.Z_FIXED]


def compress(rng, data):
    packer = zlib.compressobj(rng.randint(0, 9), zlib.DEFLATED, 31, rng.randint(1, 9), rng.choice(STRATEGIES))
    out = b""
    for _ in range(rng.randint(1, 3)):
        cut = rng.randint(0, len(data))
        out += packer.compress(data[:cut])
        out += packer.flush(rng.choice([zlib.Z_NO_FLUSH, zlib.Z_SYNC_FLUSH, zlib.Z_FULL_FLUSH]))
        data = data[cut:]
    return out + packer.compress(data) + packer.flush()


def test_what_zlib_compresses_is_read_back(probe):
    rng = random.Random(1)
    for _ in range(150):
        data = some_bytes(rng)
        assert gunzip(probe, compress(rng, data), rng.choice([7, 1000, 1 << 20])) == data
    for _ in range(1000):
        data = some_bytes(rng)[: rng.randint(0, 300)]
        assert gunzip(probe, compress(rng, data), rng.choice([1, 7, 1000])) == data


def test_gzip_headers_members_and_padding_are_read(probe):
    def member(data, flags, extra):
        raw = zlib.compressobj(wbits=-15)
        head = b"\x1f\x8b\x08" + bytes([flags]) + b"\0\0\0\0\x02\x03" + extra
        if flags & 2:
            head += (zlib.crc32(head) & 0xFFFF).to_bytes(2, "little")
        tail = zlib.crc32(data).to_bytes(4, "little") + len(data).to_bytes(4, "little")
        return head + raw.compress(data) + raw.flush() + tail

    plain = member(b"one", 0, b"")
    everything = member(b"two " * 9000, 31, b"\x05\x00extra" + b"a name\0" + b"a comment\0")
    for packed in [plain, everything, plain + everything, plain + b"\0" * 600, everything + b"\0" + plain + everything]:
        assert gunzip(probe, packed) == gzip.decompress(packed) == zlib_gunzip(packed)
    wrong_crc = bytearray(everything)
    wrong_crc[everything.index(b"a comment\0") + 10] ^= 1
    with pytest.raises(ProbeError, match="the header must match its CRC"):
        gunzip(probe, bytes(wrong_crc))
    with pytest.raises(ProbeError, match="reserved header flags"):
        gunzip(probe, member(b"x", 32, b""))
    with pytest.raises(ProbeError, match="a member must begin with 1F 8B"):
        gunzip(probe, plain + b"garbage")


def test_damaged_gzip_is_refused_exactly_where_zlib_refuses_it(probe):
    """Bits flipped, bytes replaced, cut off, put in or taken out: the same verdict as zlib's, and the same bytes if it accepts."""
    rng = random.Random(2)
    accepted = refused = 0
    for _ in range(2500):
        packed = bytearray(compress(rng, some_bytes(rng)[: rng.choice([0, 40, 300, 3000])]))
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(packed)) if rng.random() < 0.5 else min(len(packed) - 1, rng.randrange(60))
            change = rng.randrange(5)
            if change == 0:
                packed[at] ^= 1 << rng.randrange(8)
            elif change == 1:
                packed[at] = rng.randrange(256)
            elif change == 2:
                packed[at:at] = rng.randbytes(1)
            elif change == 3 and len(packed) > 1:
                del packed[at]
            elif len(packed) > 1:
                del packed[max(1, at) :]
        packed = bytes(packed)
        try:
            want = zlib_gunzip(packed)
        except zlib.error:
            refused += 1
            with pytest.raises(ProbeError, match=r"^\[x.gz\] must be an undamaged gzip file: .*Download or compress it again"):
                gunzip(probe, packed)
        else:
            accepted += 1
            assert gunzip(probe, packed) == want
    assert accepted > 20 and refused > 1200


def test_malformed_blocks_are_refused_as_zlib_refuses_them(probe):
    """Random bits behind a good header reach what mutations of good files seldom do: code lengths, distances, block types."""
    rng = random.Random(3)
    refused = 0
    for _ in range(2500):
        packed = b"\x1f\x8b\x08\0\0\0\0\0\0\0" + bytes([rng.choice([1, 2, 3, 4, 5, 6, 7])]) + rng.randbytes(rng.randint(0, 90))
        try:
            want = zlib_gunzip(packed)
        except zlib.error:
            refused += 1
            with pytest.raises(ProbeError, match="undamaged gzip file"):
                gunzip(probe, packed)
        else:
            assert gunzip(probe, packed) == want
    assert refused > 2000


def one_match(distance_code):
    """A member of the byte "a" and a match of three bytes behind it, in fixed codes (RFC 1951, 3.2.6)."""
    codes = ["1", "10", f"{0x30 + ord('a'):08b}", f"{1:07b}", f"{distance_code:05b}", f"{0:07b}"]  # in the order of their bits
    bits = "".join(codes)
    packed = bytes(int(bits[i : i + 8][::-1], 2) for i in range(0, len(bits), 8))
    return b"\x1f\x8b\x08" + bytes(7) + packed + zlib.crc32(b"aaaa").to_bytes(4, "little") + (4).to_bytes(4, "little")


def test_a_match_begins_within_the_data_of_its_member(probe):
    assert gunzip(probe, one_match(0)) == zlib_gunzip(one_match(0)) == b"aaaa"
    for before in (b"", gzip.compress(b"bb", mtime=0)):
        with pytest.raises(zlib.error, match="too far back"):
            zlib_gunzip(before + one_match(1))
        with pytest.raises(ProbeError, match="a match may not begin before the data"):
            gunzip(probe, before + one_match(1))


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.jsonl", "rows.json.gz", "rows.csv.gz", "rows.txt.gz"])
def test_a_gzip_file_is_known_by_its_first_bytes_and_its_kind_by_its_name(read, name):
    rows = [{"text": f"row {i} " + "x" * (i % 50)} for i in range(30_000)]
    if ".csv" in name:
        raw = "text\r\n" + "".join(row["text"] + "\r\n" for row in rows)
    elif ".txt" in name:
        raw = "".join(row["text"] + "\n" for row in rows)
    elif ".jsonl" in name:
        raw = "".join(json.dumps(row) + "\n" for row in rows)
    else:
        raw = json.dumps(rows)
    assert read(name, gzip.compress(b"\xef\xbb\xbf" + raw.encode()))[0] == rows


def test_a_gzip_file_that_is_cut_off_is_named(read):
    with pytest.raises(ProbeError, match="rows.jsonl.gz.*it ends early"):
        read("rows.jsonl.gz", gzip.compress(b'{"text": "abc"}\n' * 100)[:-9])


def test_a_row_is_bounded_in_a_gzip_file_too(read):
    bomb = gzip.compress(b'{"text": "' + b"a" * (65 << 20) + b'"}', 1)
    assert len(bomb) < 1 << 20
    with pytest.raises(ProbeError, match="200 times its bytes"):  # whatever a row may have
        read("bomb.jsonl.gz", bomb)


# --- CSV


def python_csv(text, separator=","):
    """The rows of csv.DictReader; strict, as ours. @raises csv.Error."""
    records = [r for r in csv.reader(io.StringIO(text, newline=""), delimiter=separator, strict=True) if r]
    return records[0], records[1:]


@pytest.mark.parametrize(("name", "separator"), [("t.csv", ","), ("t.tsv", "\t")])
def test_what_csv_writes_is_read_back(read, name, separator):
    rng = random.Random(4)
    alphabet = ["a", "b", '"', ",", "\t", "\n", "\r\n", " ", "é", "漢", "'", ";", "\\"]
    for _ in range(300):
        columns = [f"c{i}" for i in range(rng.randint(2, 5))]
        table = [["".join(rng.choices(alphabet, k=rng.randint(0, 12))) for _ in columns] for _ in range(rng.randint(1, 6))]
        out = io.StringIO(newline="")
        end = rng.choice(["\n", "\r\n", "\r"])
        quoting = rng.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL]) if end != "\r" else csv.QUOTE_ALL  # else "\n" stays bare
        csv.writer(out, delimiter=separator, quoting=quoting, lineterminator=end).writerows([columns, *table])
        text = out.getvalue() if rng.random() < 0.7 else out.getvalue().removesuffix(end)
        bom = rng.choice([b"", b"\xef\xbb\xbf"])
        assert read(name, bom + text.encode())[0] == [dict(zip(columns, row, strict=True)) for row in table]


def test_any_text_is_read_as_pythons_csv_reads_it_or_refused(read):
    """Every text of six characters from , " a and line ends, and longer random ones, below a header of two columns."""
    rng = random.Random(5)
    texts = ["".join(t) for t in itertools.product(',"a\n', repeat=5)]
    texts += ["".join(rng.choices(',"a\n\r b', k=rng.randint(4, 30))) for _ in range(600)]
    same = 0
    for text in texts:
        try:
            _, records = python_csv("x,y\n" + text)
        except csv.Error:
            records = None
        if records is not None and all(len(record) == 2 for record in records):
            assert read("t.csv", b"x,y\n" + text.encode())[0] == [{"x": a, "y": b} for a, b in records], text
            same += 1
        else:
            with pytest.raises(
                ProbeError, match=r"t.csv:\d+\] (a row must have 2 fields|a quoted field must end|a separator or)"
            ):
                read("t.csv", b"x,y\n" + text.encode())
    assert same > 100


def test_lines_of_csv_rows_are_where_they_begin(read):
    rows, lines, blank = read("t.csv", b'a,b\n\n1,"x\ny\nz"\n\n2,"w"\n')
    assert rows == [{"a": "1", "b": "x\ny\nz"}, {"a": "2", "b": "w"}] and lines == [3, 7] and blank == 2


def test_the_unnamed_index_that_pandas_writes_has_pandas_name(read):
    assert read("t.csv", b",text\n0,hello\n")[0] == [{"Unnamed: 0": "0", "text": "hello"}]


BAD_CSV = {
    "a field too many": (
        b"a,b\n1,2,3\n",
        r":2\] a row must have 2 fields, as the header has; got 3. Quote fields that contain a comma",
    ),
    "a field too few": (b"a,b\n1,2\n3\n", r":3\] a row must have 2 fields, as the header has; got 1"),
    "an open quote": (b'a,b\n1,"2\n3\n', r":2\] a quoted field must end with a quote"),
    "text behind a quote": (b'a,b\n1,"2"3\n', r":2\] a separator or the end of the line must follow a closing quote"),
    "a column twice": (b"a,b,a\n1,2,3\n", r":1\] the header must name each column once; 'a' appears twice"),
    "semicolons": (b"question;answer\n1;2\n", r":1\] columns must be separated by commas; the header is 'question;answer'"),
    "tabs": (b"question\tanswer\n1\t2\n", r":1\] columns must be separated by commas; .* name a file with tabs .tsv"),
    "no UTF-8": (b"a,b\n1,\xe9\n", r":2\] a field must be UTF-8; byte 0 of field 2 is not"),
    "too many fields": (b"a,b\n" + b"," * 2000 + b"\n", r":2\] a row may have at most 1024 fields"),
    "too large": (b'a,b\n1,"' + b"x" * (65 << 20), r":2\] a row may have at most 67108864 bytes"),
}


@pytest.mark.parametrize("name", BAD_CSV)
def test_bad_csv_is_named_with_its_line(read, name):
    raw, message = BAD_CSV[name]
    with pytest.raises(ProbeError, match=r"t\.csv" + message):
        read("t.csv", raw)


# --- text


def test_text_has_a_row_a_line_or_a_paragraph(read):
    raw = b"\xef\xbb\xbfone\r\n  two, indented\n\n \t\nthree\nfour\n\n"
    assert read("t.txt", raw) == (
        [{"text": t} for t in ("one", "  two, indented", "three", "four")], [1, 2, 5, 6], 3,
    )  # fmt: skip
    rows, lines, _ = read("t.txt", raw, file_format="paragraphs")
    assert rows == [{"text": "one\n  two, indented"}, {"text": "three\nfour"}] and lines == [1, 5]
    assert read("t.txt", b"last line without an end", text_field="body")[0] == [{"body": "last line without an end"}]


def test_json_in_a_text_file_and_text_without_utf_8_are_refused(read):
    with pytest.raises(
        ProbeError, match=r"t.txt:2\] a .txt file is read as text; this row is a JSON object. Name the file .jsonl"
    ):
        read("t.txt", b'\n{"text": "a"}\n')
    assert read("t.txt", b'{"text": "a"}\n', file_format="json")[0] == [{"text": "a"}]
    assert read("t.txt", b"code: {x}\n")[0] == [{"text": "code: {x}"}]
    with pytest.raises(ProbeError, match=r"t.txt:2\] text must be UTF-8; byte 1 of the row"):
        read("t.txt", b"fine\nb\xff\n")


# --- formats by name, and other files


def test_the_format_of_a_file_can_be_given(read):
    for name, data_format in [("rows", "csv"), ("rows.jsonl", "csv"), ("rows.CSV", "auto"), ("rows.Tsv", "csv")]:
        assert read(name, b"text,n\na,1\n", file_format=data_format)[0] == [{"text": "a", "n": "1"}]
    with pytest.raises(ProbeError, match=r"\[data_format\] must be auto, json, .*; got 'xml'"):
        read("rows", b"", file_format="xml")
    with pytest.raises(ProbeError, match="does not begin with { or .. Rename it, or set --data_format"):
        read("rows", b"text,n\na,1\n")


OTHER = {
    "parquet": (b"PAR1....", "got a Parquet file. In Python, pass datasets.load_dataset"),
    "arrow": (b"ARROW1\0\0", "got an Arrow file"),
    "zip": (b"PK\x03\x04....", "got a zip archive"),
    "zstd": (b"\x28\xb5\x2f\xfd....", "got a zstd file. Unpack it, or compress it with gzip"),
    "bzip2": (b"BZh9....", "got a bzip2 file"),
    "xz": (b"\xfd7zXZ\0....", "got an xz file"),
    "UTF-16": ("text".encode("utf-16"), "got UTF-16"),
    "gzip twice": (gzip.compress(gzip.compress(b"x")), "a gzip file in a gzip file. Unpack it once"),
    "rows inside an object": (
        b'{\n  "version": [{}],\n "data": [{"text": "a"}]}',
        r":1\] a file of rows must be JSON lines or one array; .* rows inside 'version'",
    ),
    "rows inside an object, less spread": (b'{"data": [\n{"text": "a"}\n]}', "rows inside 'data'. Write that array alone"),
    "one object over several lines": (
        b'{\n "text": "a"\n}\n',
        r":1\] must be valid JSON: one row per line, or an array of rows",
    ),
}


@pytest.mark.parametrize("name", OTHER)
def test_other_files_are_named_with_the_way_out(read, name):
    raw, message = OTHER[name]
    for file in ("rows.jsonl", "rows.json"):
        with pytest.raises(ProbeError, match=message):
            read(file, raw)


def test_a_hub_name_in_place_of_a_file_is_told_how_to_become_one(probe):
    with pytest.raises(ProbeError, match=r"No such file.*load_dataset\('tatsu-lab/alpaca', split='train'\).to_json"):
        probe.ask("rows", path="tatsu-lab/alpaca")
    with pytest.raises(ProbeError, match="No such file or directory. Check the path of the data"):
        probe.ask("rows", path="./no/rows.jsonl")


def test_keys_keep_their_order(read, probe, tmp_path):
    raw = '{"z":1,"a":{"y":2,"b":[{"x":3,"c":null}]}}'
    (tmp_path / "t.jsonl").write_text(raw)
    assert probe.ask("rows", path=str(tmp_path / "t.jsonl"))["rows"] == [raw]
    with pytest.raises(ProbeError, match="an object of a row may have at most 1024 keys"):
        read("t.jsonl", json.dumps({f"k{i}": i for i in range(1025)}).encode())
