# SPDX-License-Identifier: Apache-2.0
"""Runs the Python scenarios of faults.py. Imports once and forks for each run, under the shim (LD_PRELOAD).

    python python_server.py MADE     MADE: the folder with model/ and rows.jsonl

Requests and answers are lines of JSON. Request: {"what", "out", "resume", "old", "at", "do", "kill_after"}. Answer: {"code": exit code or
-signal, "saved": checkpoints that were committed, "calls": file calls below out, "seconds", "error"}.
"""

import ctypes
import json
import os
import pathlib
import signal
import sys
import tempfile
import threading
import time
import traceback

import qlorapp
import torch
import transformers


class Server:
    def __init__(self, made: pathlib.Path) -> None:
        self.shim = ctypes.CDLL(None)  # preloaded
        self.shim.fault_calls.restype = ctypes.c_long
        transformers.set_seed(1)
        model = qlorapp.AutoModelForCausalLM.from_pretrained(made / "model")
        config = qlorapp.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM")
        self.model = qlorapp.get_peft_model(model, config)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape) * 0.05)
        self.rows = [json.loads(line) for line in (made / "rows.jsonl").read_text().splitlines()]
        kept = {name: value.clone() for name, value in self.model.named_parameters() if "lora_" in name}
        with tempfile.TemporaryDirectory() as out:  # what is imported late is there before the first fork
            self._trainer(out).train()
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                if name in kept:
                    parameter.copy_(kept[name])

    def answer(self, request: dict) -> dict:
        reader, writer = os.pipe()
        began = time.monotonic()
        child = os.fork()
        if child == 0:
            os.close(reader)
            self._child(request, writer)
        os.close(writer)
        timer = threading.Timer(request.get("kill_after", 1e6), os.kill, [child, signal.SIGKILL])
        if "kill_after" in request:
            timer.start()
        with os.fdopen(reader) as pipe:
            said = [line.split(" ", 1) for line in pipe.read().splitlines()]
        timer.cancel()  # the child has ended and still has its number
        _, status = os.waitpid(child, 0)
        found = {key: [value for name, value in said if name == key] for key in ("saved", "calls", "error")}
        return {
            "code": os.waitstatus_to_exitcode(status),
            "saved": found["saved"],
            "calls": int(found["calls"][0]) if found["calls"] else 0,
            "seconds": time.monotonic() - began,
            "error": json.loads(found["error"][0]) if found["error"] else "",
        }

    def _child(self, request: dict, pipe: int) -> None:
        code = 1
        try:
            run = self._prepared(request, pipe)
            self.shim.fault_arm(request["out"].encode(), ctypes.c_long(request.get("at", 0)), request.get("do", "").encode())
            try:
                run()
                code = 0
            finally:
                calls = self.shim.fault_calls()
                self.shim.fault_arm(b"", ctypes.c_long(0), b"")
                os.write(pipe, f"calls {calls}\n".encode())
        except BaseException:
            os.write(pipe, b"error " + json.dumps(traceback.format_exc()[-4000:]).encode() + b"\n")
        finally:
            os._exit(code)

    def _prepared(self, request: dict, pipe: int):
        """The call that is disturbed."""
        if request.get("old"):  # another adapter, whose config and weights differ
            self.model.peft_config["default"].lora_alpha = 99
            with torch.no_grad():
                for name, parameter in self.model.named_parameters():
                    if "lora_" in name:
                        parameter.fill_(0.5)
        out, what = request["out"], request["what"]
        if what == "save_pretrained":
            return lambda: self.model.save_pretrained(out)

        class Says(transformers.TrainerCallback):
            def on_save(self, args, state, control, **_):
                os.write(pipe, f"saved checkpoint-{state.global_step}\n".encode())

        trainer = self._trainer(out, Says())
        if what == "trainer.save_model":
            return lambda: trainer.save_model(out)
        return lambda: trainer.train(resume_from_checkpoint=request.get("resume"))

    def _trainer(self, out: str, *callbacks: transformers.TrainerCallback) -> qlorapp.Trainer:
        args = qlorapp.TrainingArguments(
            out, max_steps=4, save_steps=2, save_total_limit=2, per_device_train_batch_size=1, learning_rate=1e-2, report_to="none",
            disable_tqdm=True, logging_strategy="no", use_cpu=True,
        )  # fmt: skip
        return qlorapp.Trainer(self.model, args, train_dataset=self.rows, callbacks=list(callbacks))


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the library prints is no answer
    server = Server(pathlib.Path(sys.argv[1]))
    for line in sys.stdin:
        print(json.dumps(server.answer(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main()
