// SPDX-License-Identifier: Apache-2.0
// Stands before libc in a program: main() runs in forks of it, one per request (command_server.py). Each has arguments, environment, folder
// and pipes of its own. A process needs 0.4 s of a processor to load torch's libraries and to take them down again.
#include <dlfcn.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

namespace {

using Main = int (*)(int, char**, char**);

constexpr size_t kMostBytes = 1 << 20;
constexpr int kPipes = 4;  // standard input, output, errors; what became of the process

Main program = nullptr;
char request[kMostBytes];

/// @returns the bytes received; 0 at the end.
ssize_t receive(int from, int (&pipes)[kPipes]) {
  iovec place{request, kMostBytes};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof(pipes))];
  msghdr message{};
  message.msg_iov = &place;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof(control);
  const ssize_t size = recvmsg(from, &message, 0);
  const cmsghdr* const header = CMSG_FIRSTHDR(&message);
  if (size <= 0 || header == nullptr || header->cmsg_len != CMSG_LEN(sizeof(pipes))) return 0;
  std::memcpy(pipes, CMSG_DATA(header), sizeof(pipes));
  return size;
}

void say(int to, int number) {
  char text[16];
  const int size = std::snprintf(text, sizeof(text), "%d\n", number);
  if (write(to, text, static_cast<size_t>(size)) != size) _exit(1);
}

/// The request: folder, number of arguments, arguments, environment; each text ends with a zero. Lists live until the process has ended.
int run(ssize_t size) {
  std::vector<char*> texts;
  for (char* at = request; at < request + size; at += std::strlen(at) + 1) texts.push_back(at);
  if (chdir(texts[0]) != 0) _exit(126);
  const int count = std::atoi(texts[1]);
  auto& arguments = *new std::vector<char*>(texts.begin() + 2, texts.begin() + 2 + count);
  auto& variables = *new std::vector<char*>(texts.begin() + 2 + count, texts.end());
  arguments.push_back(nullptr);
  variables.push_back(nullptr);
  environ = variables.data();
  return program(count, arguments.data(), environ);
}

int serve(int, char**, char**) {
  const int requests = std::atoi(std::getenv("START_SERVER"));
  std::signal(SIGCHLD, SIG_IGN);  // nothing waits for those that wait
  while (true) {
    int pipes[kPipes];
    const ssize_t size = receive(requests, pipes);
    if (size == 0) _exit(0);
    if (fork() == 0) {
      close(requests);
      std::signal(SIGCHLD, SIG_DFL);
      const pid_t pid = fork();
      if (pid == 0) {
        for (int i = 0; i < 3; ++i) dup2(pipes[i], i);
        for (const int each : pipes) close(each);
        const int code = run(size);
        std::fflush(nullptr);
        _exit(code);  // taking torch's libraries down takes as long as loading them
      }
      for (int i = 0; i < 3; ++i) close(pipes[i]);
      int status = 0;
      waitpid(pid, &status, 0);
      say(pipes[3], WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status));
      _exit(0);
    }
    for (const int each : pipes) close(each);
  }
}

}  // namespace

extern "C" int __libc_start_main(Main main, int count, char** arguments, void (*begin)(), void (*end)(), void (*loader_end)(),
                                 void* stack) {
  using Start = int (*)(Main, int, char**, void (*)(), void (*)(), void (*)(), void*);
  program = main;
  return reinterpret_cast<Start>(dlsym(RTLD_NEXT, "__libc_start_main"))(serve, count, arguments, begin, end, loader_end, stack);
}
