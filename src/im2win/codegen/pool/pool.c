/* A thread pool. Idle threads wait on a condition variable. After each job they spin briefly, since the next layer usually follows at once. */
#define _GNU_SOURCE
#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <unistd.h>

#include "im2win.h"
#include "threads.h"

#define MOST_THREADS 1024
#define TASKS_BITS 16
#define STOP 0xFFFF /* in place of a number of tasks: workers end */
#define SPINS 4096  /* of about 40 to 140 cycles each; none where threads outnumber CPUs */

struct worker {
  pthread_t thread;
  uint64_t seen; /* the last ticket before it started */
  int task;
};

/* A ticket is a job's number and its number of tasks in one word. A thread with a task of the job may read the job, which is valid until
   all its tasks are done. Other threads read the ticket only. */
static struct {
  pthread_mutex_t busy; /* held by the caller whose tasks run */
  pthread_mutex_t lock;
  pthread_cond_t wake, done;
  _Atomic uint64_t ticket;
  atomic_int remaining, failure, wanted, spins;
  int workers, waiting, closed;
  im2win_pool_task task;
  void *context;
} pool = {.busy = PTHREAD_MUTEX_INITIALIZER, .lock = PTHREAD_MUTEX_INITIALIZER, .wake = PTHREAD_COND_INITIALIZER,
          .done = PTHREAD_COND_INITIALIZER};

static struct worker worker[MOST_THREADS];
static int cpus;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static int usable_cpus(void) {
#ifdef __linux__
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return CPU_COUNT(&set);
#endif
  long online = sysconf(_SC_NPROCESSORS_ONLN);
  return online < 1 ? 1 : online > MOST_THREADS ? MOST_THREADS : (int)online;
}

static void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

/* The child of a fork has none of the threads. */
static void forked(void) {
  pthread_mutex_init(&pool.busy, NULL);
  pthread_mutex_init(&pool.lock, NULL);
  pthread_cond_init(&pool.wake, NULL);
  pthread_cond_init(&pool.done, NULL);
  atomic_store(&pool.remaining, 0);
  pool.workers = pool.waiting = 0;
}

static void prepare(void) {
  pthread_atfork(NULL, NULL, forked);
  cpus = usable_cpus();
}

int im2win_set_threads(int threads) {
  if (threads < 1 || threads > MOST_THREADS) return IM2WIN_BAD_THREADS;
  atomic_store(&pool.wanted, threads);
  return IM2WIN_OK;
}

int im2win_threads(void) {
  int wanted = atomic_load(&pool.wanted);
  if (wanted) return wanted;
  pthread_once(&once, prepare);
  return cpus;
}

static void run_one(int task, int tasks) {
  int status = pool.task(pool.context, task, tasks), none = 0;
  if (status) atomic_compare_exchange_strong(&pool.failure, &none, status);
}

static uint64_t next_ticket(uint64_t seen) {
  uint64_t ticket = seen;
  int spins = atomic_load_explicit(&pool.spins, memory_order_relaxed);
  for (int spin = 0; spin < spins && ticket == seen; spin++) {
    relax();
    ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire);
  }
  if (ticket != seen) return ticket;
  pthread_mutex_lock(&pool.lock);
  while ((ticket = atomic_load_explicit(&pool.ticket, memory_order_acquire)) == seen) pthread_cond_wait(&pool.wake, &pool.lock);
  pthread_mutex_unlock(&pool.lock);
  return ticket;
}

static void *work(void *self) {
  struct worker *own = self;
  for (uint64_t ticket = own->seen;;) {
    ticket = next_ticket(ticket);
    int tasks = (int)(ticket & ((1 << TASKS_BITS) - 1));
    if (tasks == STOP) return NULL;
    if (own->task >= tasks) continue;
    run_one(own->task, tasks);
    if (atomic_fetch_sub_explicit(&pool.remaining, 1, memory_order_acq_rel) == 1) {
      pthread_mutex_lock(&pool.lock);
      if (pool.waiting) pthread_cond_signal(&pool.done);
      pthread_mutex_unlock(&pool.lock);
    }
  }
}

static void publish(int tasks) {
  pthread_mutex_lock(&pool.lock);
  uint64_t number = atomic_load_explicit(&pool.ticket, memory_order_relaxed) >> TASKS_BITS;
  atomic_store_explicit(&pool.ticket, (number + 1) << TASKS_BITS | (uint64_t)tasks, memory_order_release);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
}

/* Starts workers for so many tasks. Returns the number of tasks that have a thread. */
static int staffed(int tasks) {
  while (pool.workers < tasks - 1) {
    struct worker *next = &worker[pool.workers];
    next->task = pool.workers + 1;
    next->seen = atomic_load(&pool.ticket);
    if (pthread_create(&next->thread, NULL, work, next) != 0) break;
    pool.workers++;
  }
  return tasks - 1 < pool.workers ? tasks : pool.workers + 1;
}

int im2win_pool_1_run(im2win_pool_task task, void *context, int most) {
  pthread_once(&once, prepare);
  int threads = im2win_threads(), tasks = most < threads ? most : threads;
  if (tasks < 2 || pthread_mutex_trylock(&pool.busy) != 0) return task(context, 0, 1);
  tasks = pool.closed ? 1 : staffed(tasks);
  if (tasks < 2) {
    pthread_mutex_unlock(&pool.busy);
    return task(context, 0, 1);
  }
  pool.task = task;
  pool.context = context;
  atomic_store(&pool.failure, 0);
  atomic_store(&pool.remaining, tasks - 1);
  int spins = tasks <= cpus ? SPINS : 0;
  atomic_store_explicit(&pool.spins, spins, memory_order_relaxed);
  publish(tasks);
  run_one(0, tasks);
  for (int spin = 0; spin < spins && atomic_load_explicit(&pool.remaining, memory_order_acquire); spin++) relax();
  if (atomic_load_explicit(&pool.remaining, memory_order_acquire)) {
    pthread_mutex_lock(&pool.lock);
    pool.waiting = 1;
    while (atomic_load_explicit(&pool.remaining, memory_order_acquire)) pthread_cond_wait(&pool.done, &pool.lock);
    pool.waiting = 0;
    pthread_mutex_unlock(&pool.lock);
  }
  int status = atomic_load(&pool.failure);
  pthread_mutex_unlock(&pool.busy);
  return status;
}

/* Runs when the library is closed or the program ends: no thread may remain in code that is unmapped. */
__attribute__((destructor)) static void close_pool(void) {
  if (pthread_mutex_trylock(&pool.busy) != 0) return;
  pool.closed = 1;
  if (pool.workers) publish(STOP);
  for (int i = 0; i < pool.workers; i++) pthread_join(worker[i].thread, NULL);
  pool.workers = 0;
  pthread_mutex_unlock(&pool.busy);
}
