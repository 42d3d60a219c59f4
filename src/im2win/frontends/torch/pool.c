/* Parallel loops of kernels on the OpenMP threads of the process, which PyTorch's own operators use: two pools whose
   threads spin while they wait for work slow each other down. The caller passes OpenMP's functions, from the library that PyTorch loads. */
#include <stdatomic.h>
#include <stdint.h>

struct group { /* the argument of a loop's body in TVM's kernels */
  void *handle;
  int32_t tasks;
};

typedef int (*loop)(int task, struct group *group, void *data);

struct job {
  loop body;
  void *data;
  int tasks;
  atomic_int failure;
};

static struct {
  void (*parallel)(void (*body)(void *), void *data, unsigned threads, unsigned flags); /* GOMP_parallel */
  int (*thread)(void), (*threads)(void), (*most)(void); /* omp_get_thread_num, omp_get_num_threads, omp_get_max_threads */
} openmp;

void im2win_openmp(void *parallel, void *thread, void *threads, void *most) {
  *(void **)&openmp.parallel = parallel;
  *(void **)&openmp.thread = thread;
  *(void **)&openmp.threads = threads;
  *(void **)&openmp.most = most;
}

static void share(void *given) {
  struct job *job = given;
  struct group group = {0, job->tasks};
  for (int task = openmp.thread(), threads = openmp.threads(); task < job->tasks; task += threads) {
    int failure = job->body(task, &group, job->data);
    if (failure) atomic_store(&job->failure, failure);
  }
}

/* Replaces TVMBackendParallelLaunch: runs a loop in so many tasks, or in one for each thread if 0. Returns 0, or a failed task's result. */
int im2win_launch(loop body, void *data, int tasks) {
  struct job job = {body, data, tasks > 0 ? tasks : openmp.most(), 0};
  if (job.tasks == 1) {
    struct group group = {0, 1};
    return body(0, &group, data);
  }
  openmp.parallel(share, &job, 0, 0);
  return atomic_load(&job.failure);
}
