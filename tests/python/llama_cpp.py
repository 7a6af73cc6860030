# SPDX-License-Identifier: Apache-2.0
"""llama.cpp itself over a GGUF file: its tokenizer, its templates, its probabilities."""

import ctypes
import json
import subprocess
import sys
import urllib.request
import weakref

import numpy
import xllamacpp

SECONDS = 60  # for an answer


def serve(file, context, adapter):
    """Until standard input ends. Prints the address."""
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.verbosity = file, context, 1, 0
    if adapter:
        params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(adapter, 1.0)]
    params.warmup = params.fit_params = False
    params.use_jinja = True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()


class LlamaCpp:
    """A file, computed on one thread in float32, in a process of its own: what llama.cpp makes of a bad file ends that one."""

    def __init__(self, file, context=256, adapter=""):
        command = [sys.executable, __file__, str(file), str(context), str(adapter)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        weakref.finalize(self, self._process.kill)
        self._address = self._process.stdout.readline().strip()
        assert self._address, self._process.stderr.read()[-2000:]

    def _post(self, path, **body):
        request = urllib.request.Request(self._address + path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)

    def tokenize(self, text, special=True):
        return self._post("/tokenize", content=text, add_special=special, parse_special=True)["tokens"]

    def render(self, messages):
        return self._post("/apply-template", messages=messages)["prompt"]

    def _complete(self, ids, count, **options):
        body = {"prompt": list(ids), "n_predict": count, "temperature": 0, "cache_prompt": False}
        return self._post("/v1/completions", **body, **options)["choices"][0]

    def next_token(self, ids, vocabulary):
        """(vocabulary,) log-probabilities behind ids; None if the most probable token is a part of a character, which llama.cpp holds back."""
        shown = self._complete(ids, 1, n_probs=vocabulary).get("logprobs")
        if not shown or not shown["content"]:
            return None
        found = numpy.full(vocabulary, numpy.nan, numpy.float32)
        for entry in shown["content"][0]["top_logprobs"]:
            found[entry["id"]] = entry["logprob"]
        return found

    def greedy(self, ids, count):
        """The text behind ids."""
        return self._complete(ids, count)["text"]


def quantized(values, kind, importance=None):
    """(rows, columns) float32 in blocks of a gguf.GGMLQuantizationType, by ggml's own code. importance: (columns) float32, an importance matrix."""
    import gguf

    library = ctypes.CDLL(xllamacpp.xllamacpp.__file__)
    library.ggml_quantize_chunk.restype = ctypes.c_size_t
    size = ctypes.c_int64
    library.ggml_quantize_chunk.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, size, size, size, ctypes.c_void_p]
    elements, nbytes = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = values.shape
    blocks = numpy.zeros((rows, columns // elements * nbytes), numpy.uint8)
    weights = None if importance is None else numpy.ascontiguousarray(importance, numpy.float32)
    pointer = None if weights is None else weights.ctypes.data
    library.ggml_quantize_chunk(kind.value, values.ctypes.data, blocks.ctypes.data, 0, rows, columns, pointer)
    return blocks


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3])
