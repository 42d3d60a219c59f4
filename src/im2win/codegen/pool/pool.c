/* A thread pool. Idle threads wait on a condition variable. After each job they spin briefly, since the next layer usually follows at once.
   Threads are not bound to CPUs, but those of a job do not share one (`spread`). Where other threads hold the CPUs, such as those of
   another library that spin after its last call, a worker may not run for milliseconds. Its task is then the caller's (`claimed`). */
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

/* A ticket is a job's number and its number of tasks in one word. A thread that has claimed a task of the job may read the job, which is
   valid until all its tasks are done. Other threads read the ticket only. */
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
static _Atomic uint64_t claims[MOST_THREADS]; /* of each task the ticket of the last job in which a thread took it */
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

#ifdef __linux__
static _Atomic uint64_t occupied[CPU_SETSIZE / 64]; /* CPUs on which a thread of the job runs, a bit each */

/* Marks a CPU as occupied. Returns whether it was free. */
static int occupy(int cpu) {
  uint64_t bit = (uint64_t)1 << cpu % 64;
  return !(atomic_fetch_or_explicit(&occupied[cpu / 64], bit, memory_order_relaxed) & bit);
}

/* At a job's start: its caller's CPU is the only one that is occupied. */
static void gather(void) {
  int cpu = sched_getcpu();
  for (int i = 0; i < CPU_SETSIZE / 64; i++) atomic_store_explicit(&occupied[i], 0, memory_order_relaxed);
  if (cpu >= 0 && cpu < CPU_SETSIZE) occupy(cpu);
}

/* Moves the calling worker away from a CPU on which another thread of the job runs. A new thread starts on its creator's CPU, and the
   scheduler may leave two threads on one CPU for 100 ms and more while another is idle. The worker gets its set of CPUs back, so it is
   not bound afterwards. */
static void spread(void) {
  int cpu = sched_getcpu();
  cpu_set_t usable, unoccupied;
  if (cpu < 0 || cpu >= CPU_SETSIZE || occupy(cpu) || sched_getaffinity(0, sizeof usable, &usable) != 0) return;
  CPU_ZERO(&unoccupied);
  for (cpu = 0; cpu < CPU_SETSIZE; cpu++)
    if (CPU_ISSET(cpu, &usable) && !(atomic_load_explicit(&occupied[cpu / 64], memory_order_relaxed) >> cpu % 64 & 1))
      CPU_SET(cpu, &unoccupied);
  if (CPU_COUNT(&unoccupied) == 0 || sched_setaffinity(0, sizeof unoccupied, &unoccupied) != 0) return;
  if ((cpu = sched_getcpu()) >= 0 && cpu < CPU_SETSIZE) occupy(cpu);
  sched_setaffinity(0, sizeof usable, &usable);
}
#else
static void gather(void) {}
static void spread(void) {}
#endif

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

/* Whether the calling thread gets a task: its worker runs it, or the caller if it comes first. All tasks of a job are claimed before it
   ends and tickets grow, so a worker that comes too late for a job gets nothing of it, nor of a later one. */
static int claimed(int task, uint64_t ticket) {
  uint64_t last = atomic_load_explicit(&claims[task], memory_order_relaxed);
  return last < ticket && atomic_compare_exchange_strong_explicit(&claims[task], &last, ticket, memory_order_acq_rel, memory_order_relaxed);
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
    if (tasks <= cpus) spread(); /* first, since to move takes a while, for which the caller need not wait */
    if (!claimed(own->task, ticket)) continue;
    run_one(own->task, tasks);
    if (atomic_fetch_sub_explicit(&pool.remaining, 1, memory_order_acq_rel) == 1) {
      pthread_mutex_lock(&pool.lock);
      if (pool.waiting) pthread_cond_signal(&pool.done);
      pthread_mutex_unlock(&pool.lock);
    }
  }
}

static uint64_t publish(int tasks) {
  pthread_mutex_lock(&pool.lock);
  uint64_t number = atomic_load_explicit(&pool.ticket, memory_order_relaxed) >> TASKS_BITS;
  uint64_t ticket = (number + 1) << TASKS_BITS | (uint64_t)tasks;
  atomic_store_explicit(&pool.ticket, ticket, memory_order_release);
  pthread_cond_broadcast(&pool.wake);
  pthread_mutex_unlock(&pool.lock);
  return ticket;
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
  gather();
  int spins = tasks <= cpus ? SPINS : 0;
  atomic_store_explicit(&pool.spins, spins, memory_order_relaxed);
  uint64_t ticket = publish(tasks);
  run_one(0, tasks);
  for (int task = tasks - 1; task > 0; task--) {
    if (!claimed(task, ticket)) continue;
    run_one(task, tasks);
    atomic_fetch_sub_explicit(&pool.remaining, 1, memory_order_relaxed);
  }
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
