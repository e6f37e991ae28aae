/* The logger that a host hands to a plugin (ncclDebugLogger_t): formats the line and gives it to Rust. */
#include <stdarg.h>
#include <stdio.h>

void evenkeel_bench_line(int level, const char *line);

void evenkeel_bench_log(int level, unsigned long subsystems, const char *file, int line, const char *format, ...) {
  char text[2048];
  va_list arguments;
  (void)subsystems;
  (void)file;
  (void)line;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  evenkeel_bench_line(level, text);
}
