/* What the drivers share: ranks that are threads or processes, numbers to draw, memory that all of them see. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>

enum { MAX_R = 64 };
static int ranks, threads, killer, stopper;
static NodeDoor *doors;
static volatile int32_t *pids; /* of the ranks, if they are processes */

static void *shared_memory(size_t bytes) {
    void *p = mmap(0, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (p == MAP_FAILED) perror("mmap"), exit(2);
    return p;
}
static uint64_t mix(uint64_t a) {
    a ^= a >> 30, a *= 0xbf58476d1ce4e5b9u, a ^= a >> 27, a *= 0x94d049bb133111ebu;
    return a ^ a >> 31;
}
static uint64_t rng(uint64_t *s) { return mix(*s += 0x9e3779b97f4a7c15u); }

/* The words behind the first four: a rank's kind, how many, the seed, how many programs. */
static int has_word(int argc, char **argv, const char *word) {
    for (int i = 5; i < argc; i++) if (!strcmp(argv[i], word)) return 1;
    return 0;
}
static void read_arguments(int argc, char **argv) {
    threads = !strcmp(argv[1], "threads"), ranks = atoi(argv[2]);
    killer = has_word(argc, argv, "kill"), stopper = has_word(argc, argv, "stop");
    doors = shared_memory(sizeof(NodeDoor) * MAX_R), pids = shared_memory(4 * MAX_R);
}

/* Run `work` for each rank's state, and print "ok"; it gives 0, or 4 where another rank was lost to it. With `kill` one
 * is killed within so many us, with `stop` they are stopped for a while. */
static int run_ranks(void *(*work)(void *), void *const *state, uint64_t seed, int kill_within_us) {
    int bad = 0, lost = 0, victim = (int)(mix(seed) % (uint64_t)ranks);
    if (threads) {
        pthread_t t[MAX_R];
        for (int q = 0; q < ranks; q++) pthread_create(&t[q], 0, work, state[q]);
        for (int q = 0; q < ranks; q++) { void *rc; pthread_join(t[q], &rc); bad |= rc != 0; }
        printf("%s\n", bad ? "WRONG" : "ok");
        return bad;
    }
    pid_t child[MAX_R];
    for (int q = 0; q < ranks; q++) {
        if (!(child[q] = fork())) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            for (int p = 0; p < ranks; p++) while (!pids[p]) usleep(100);
            exit((int)(intptr_t)work(state[q]));
        }
        pids[q] = child[q]; /* by the parent: a rank may be killed before its first line */
    }
    if (killer) usleep((useconds_t)(mix(seed + 5) % (uint64_t)kill_within_us)), kill(child[victim], SIGKILL);
    for (int left = ranks; left;) {
        int status, q = 0;
        pid_t p = waitpid(-1, &status, stopper ? WNOHANG : 0);
        if (p <= 0) {
            q = (int)(rng(&seed) % (uint64_t)ranks);
            if (child[q]) kill(child[q], SIGSTOP), usleep((useconds_t)(rng(&seed) % 8000)), kill(child[q], SIGCONT);
            usleep(1000);
            continue;
        }
        while (child[q] != p) q++;
        left--, child[q] = 0;
        int code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        if (killer && q == victim) { /* what a pidfd would tell */
            atomic_store(&doors[q].left, 1);
            for (int k = 0; k < ranks; k++) node_wake(&doors[k]);
        } else if (killer && code == 4) lost++;
        else bad |= code != 0;
    }
    if (killer) printf("lost on %d ranks ", lost);
    printf("%s\n", bad ? "WRONG" : "ok");
    return bad;
}
