// PID 1 of the guest: runs the program, sends its output out by the parallel port, then its exit status, then asks the
// emulator to stop.
#define _GNU_SOURCE
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/io.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kData = 0x378, kControl = 0x37a, kIdle = 0x08, kStrobe = 0x09, kPowerOff = 0x8900, kStrings = 1024 };

// Bochs writes what arrives there to a file at once; a serial port would cost thousands of instructions a character.
static void put(const char* text, long count) {
  while (count-- > 0) {
    outb(*text++, kData);
    outb(kStrobe, kControl);
    outb(kIdle, kControl);
  }
}

// A file of NUL-ended strings as a NULL-ended vector; `text` and `strings` hold it.
static void read_strings(const char* path, char text[65536], char* strings[kStrings]) {
  int count = 0;
  const int file = open(path, O_RDONLY);
  const long length = file < 0 ? 0 : read(file, text, 65535);
  if (file >= 0) close(file);
  for (long i = 0; i < length && count < kStrings - 1; i += (long)strlen(text + i) + 1) strings[count++] = text + i;
  strings[count] = NULL;
}

static void write_file(const char* path, const char* text) {
  const int file = open(path, O_WRONLY);
  if (file < 0) return;
  if (write(file, text, strlen(text)) < 0) perror(path);
  close(file);
}

static void mount_all(void) {
  static const struct {
    const char *place, *kind;
  } kMounts[] = {{"/proc", "proc"}, {"/sys", "sysfs"}, {"/dev", "devtmpfs"}, {"/dev/shm", "tmpfs"}, {"/tmp", "tmpfs"}};
  for (unsigned i = 0; i < sizeof kMounts / sizeof *kMounts; ++i) {
    mkdir(kMounts[i].place, 01777);
    mount(kMounts[i].kind, kMounts[i].place, kMounts[i].kind, 0, NULL);
  }
}

static void schedule(int policy, int priority) {
  const struct sched_param parameter = {.sched_priority = priority};
  sched_setscheduler(0, policy, &parameter);
}

// In the child. Under FIFO threads change only where they block, so tiles, which the guest kernel does not save, are
// never lost in the middle of a product.
static void become_program(int output, int fifo, int tiles) {
  static char argument_text[65536], environment_text[65536];
  static char *arguments[kStrings], *environment[kStrings];
  read_strings("/emu.argv", argument_text, arguments);
  read_strings("/emu.env", environment_text, environment);
  dup2(open("/dev/null", O_RDONLY), 0);
  dup2(output, 1);
  dup2(output, 2);
  for (int file = 3; file < 16; ++file) close(file);
  if (chdir("/test") != 0) dprintf(2, "init: no /test: %m\n");
  schedule(fifo ? SCHED_FIFO : SCHED_OTHER, fifo ? 1 : 0);
  iopl(0);
  enum { kRequestPermission = 0x1023, kTileData = 18 };
  if (tiles && syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) dprintf(2, "init: no tile state: %m\n");
  execve(arguments[0], arguments, environment);
  dprintf(2, "init: cannot run %s: %m\n", arguments[0]);
  _exit(127);
}

int main(void) {
  static char buffer[65536];
  iopl(3);
  outb(kIdle, kControl);
  mount_all();
  const int tiles = access("/emu.noamx", F_OK) != 0, fifo = access("/emu.nofifo", F_OK) != 0;
  write_file("/proc/sys/kernel/sched_rt_runtime_us", "-1");
  int ends[2];
  if (pipe(ends) != 0) return 1;
  fcntl(ends[1], F_SETPIPE_SZ, 1 << 20);
  schedule(SCHED_FIFO, 2);  // before the program, so that output goes out while it runs
  const pid_t child = fork();
  if (child == 0) become_program(ends[1], fifo, tiles);
  close(ends[1]);
  for (long count; (count = read(ends[0], buffer, sizeof buffer)) > 0;) put(buffer, count);
  int status = 0;
  waitpid(child, &status, 0);
  const int code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  put(buffer, snprintf(buffer, sizeof buffer,
                       "\n\x01"
                       "EMU-EXIT %d\n",
                       code));
  for (const char* letter = "Shutdown"; *letter != 0; ++letter) outb(*letter, kPowerOff);
  for (;;) pause();
}
