# make              ./train_gpt ./test_gpt ./tokenize: the CPU build
# make test         builds and runs every test that needs no GPU; the last line is 'N passed, N failed'
# make bench        one table of speeds: ours, the peer, the limit (dev/bench/bench.py)
# make fuzz         build/fuzz/fuzz: parsers of foreign files, fed with anything (dev/fuzz/run.sh runs it)
# make bench_loader build/bench_loader: tokens a second that the loader hands out
# make demo         text to a trained model in a few minutes (scripts/quickstart.sh)
# make simt         ./train_gpt_simt ./test_gpt_simt: the CUDA build, run by the emulator: every kernel, every call of CUDA's libraries
# make cuda         ./train_gpt_cuda ./test_gpt_cuda: the CUDA build by nvcc, for ARCH=90 or a list ('80 90')
# make simt_tests   build/simt/tests: the CUDA kernels, run by the emulator, against the CPU loops; needs CUDA's headers, no GPU
# make kernels_lab  build/simt/lab, build/cuda/lab: experiments with kernels (dev/kernels), in the emulator and on a GPU
# make simt_check   build/check/simt/tests and test_gpt: the same under the checker, which sees every access of every kernel (llmc/simt/checker.h)
# make coverage     which lines and calls of the CUDA build the emulator's tests execute (dev/coverage.py)
# make kernels      nvcc compiles the kernels for CUDA_ARCHS; registers, shared memory and spills of each (a spill is an error)
# make clean
#
# Switches: GEMM=dnnl (oneDNN, a vendor library) or plain (C++ loops: slow, for sanitizers), MPI=1 or 0, SANITIZE=address,undefined or thread,
# WERROR=1, BUILD=folder for objects, MARCH=native (or another processor by g++'s name), CUDA=/usr/local/cuda, CUDA_ARCHS='80 86 89 90 100 120'
# (default: 90), NCCL=1 or 0 (default: 1 where its header is), CUDNN=1: make cuda with cuDNN's attention, by the headers of cudnn-frontend in
# CUDNN_FRONTEND=folder (scripts/cudnn_frontend.sh).
# Paths are relative, so a checkout in a folder with spaces works.

GEMM ?= dnnl
MPI ?= $(if $(shell command -v mpicxx),1,0)
BUILD ?= build
MARCH ?= native
CXX := g++

# -Wno-restrict: g++ 12 warns of std::string itself (its bug 105651).
CXXFLAGS := -std=c++20 -O3 -march=$(MARCH) -fno-math-errno -fno-trapping-math -g1 -Wall -Wextra -Wno-restrict -I. -MMD -MP -pthread
ifneq ($(findstring clang,$(CXX)),)
  CXXFLAGS += -Wno-unknown-warning-option
endif
LDFLAGS := -pthread
LDLIBS :=
ifeq ($(GEMM),dnnl)
  CXXFLAGS += -fopenmp
  LDFLAGS += -fopenmp
  LDLIBS += -ldnnl
else
  CXXFLAGS += -DLLMC_GEMM_PLAIN
endif
ifeq ($(MPI),1)
  MPI_CFLAGS := $(shell mpicxx --showme:compile 2>/dev/null || echo -I/usr/include/mpi)
  LDLIBS += $(shell mpicxx --showme:link 2>/dev/null || echo -lmpi)
else
  CXXFLAGS += -DLLMC_MPI=0
endif
ifeq ($(COVERAGE),1)
  CXXFLAGS += --coverage -fprofile-update=atomic
  LDFLAGS += --coverage
endif
ifneq ($(SANITIZE),)
  CXXFLAGS += -fsanitize=$(SANITIZE) -fno-omit-frame-pointer
  LDFLAGS += -fsanitize=$(SANITIZE)
endif

DATA_OBJECTS := $(addprefix $(BUILD)/,tokenizer.o sentencepiece.o gpt2_bpe.o token_file.o megatron.o)
OBJECTS := $(addprefix $(BUILD)/,ops.o comm_mpi.o launch.o flags.o) $(DATA_OBJECTS)

.PHONY: all unit_tests simt cuda simt_tests simt_check coverage kernels_lab kernels test bench bench_loader fuzz demo clean FORCE
all: train_gpt test_gpt tokenize
	@echo "train_gpt  trainer, generation, evaluation: CPU, GEMM $(GEMM), MPI $(MPI), fp32 and bf16"
	@echo "test_gpt   goldens: ./test_gpt, or ./test_gpt --golden DIR --init-from HF_DIR --batch FILE.i32"
	@echo "tokenize   text to shards, tokenizers, --inspect, --verify, --decode, --convert"

train_gpt: $(BUILD)/train_gpt.o $(OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lsentencepiece -lxxhash
test_gpt: $(BUILD)/test_gpt.o $(OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lsentencepiece -lxxhash
tokenize: $(BUILD)/tokenize.o $(DATA_OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ -lsentencepiece_train -lsentencepiece -lxxhash -lsimdjson -lisal -lzstd

# Unit tests (GoogleTest). test_comm and test_launch have modes of their own for runs under mpirun, so each is a program.
UNIT_TESTS := $(addprefix $(BUILD)/,unit_tests test_comm test_launch)
$(BUILD)/unit_tests: $(patsubst %,$(BUILD)/test_%.o,model ops attention data documents token_file megatron loader tokenizer init checkpoint profile safetensors huggingface) $(OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lsentencepiece_train -lsentencepiece -lxxhash -lsimdjson -lisal -lzstd -lz -lgtest -lgtest_main
$(BUILD)/test_comm $(BUILD)/test_launch: %: %.o $(OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lsentencepiece -lxxhash -lgtest
# Those that run ranks as threads: what the thread sanitizer watches.
$(BUILD)/rank_tests: $(patsubst %,$(BUILD)/test_%.o,model checkpoint loader token_file) $(OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lsentencepiece -lxxhash -lgtest -lgtest_main
unit_tests: $(UNIT_TESTS)

$(BUILD)/bench_ops: $(BUILD)/bench_ops.o $(OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lsentencepiece -lxxhash
# What the vendor library and the memory give at best: bench.py's limits.
$(BUILD)/bench_limit: $(BUILD)/bench_limit.o
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS)
# bench_wire.py's measure of what a network takes from products on the same core.
$(BUILD)/bench_stack: $(BUILD)/bench_stack.o $(BUILD)/ops.o
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS)
# The calls of one step, for dev/roofline/roofline.py. The wrappers of the ops are made from ops.h.
$(BUILD)/traced_ops.h: dev/roofline/wrap_ops.py llmc/ops.h
	dev/roofline/wrap_ops.py llmc/ops.h > $@.part && mv $@.part $@
$(BUILD)/step_ops.o: dev/roofline/step_ops.cpp $(BUILD)/traced_ops.h $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) -O0 -I$(BUILD) -c $< -o $@
$(BUILD)/step_ops: $(BUILD)/step_ops.o $(OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ $(LDLIBS) -lsentencepiece -lxxhash
# Fuzz targets (dev/fuzz/fuzz.cpp); dev/fuzz/run.sh builds them with what there is: clang's libFuzzer, or g++.
fuzz:
	dev/fuzz/run.sh 0
$(BUILD)/fuzz: $(BUILD)/fuzz.o $(DATA_OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ -lsentencepiece_train -lsentencepiece -lxxhash -lsimdjson -lisal -lzstd
bench_loader: $(BUILD)/bench_loader
$(BUILD)/bench_loader: $(BUILD)/bench_loader.o $(BUILD)/token_file.o $(BUILD)/megatron.o
	$(CXX) $(LDFLAGS) $^ -o $@ -lxxhash

$(BUILD)/bench_parse: $(BUILD)/bench_parse.o $(DATA_OBJECTS)
	$(CXX) $(LDFLAGS) $^ -o $@ -lsentencepiece -lxxhash -lsimdjson -lisal -lzstd

# The kernels by g++ and the emulator: ops and its own tests with -include simt.h; the tests of the kernels are host code.
CUDA ?= /usr/local/cuda
SIMT := $(BUILD)/simt
SIMT_FLAGS = $(filter-out -fopenmp,$(CXXFLAGS)) -DLLMC_CUDA -isystem $(CUDA)/include $(if $(WITH_NCCL),,-DLLMC_NCCL=0)
NCCL ?= $(if $(wildcard $(CUDA)/include/nccl.h /usr/include/nccl.h),1,0)
WITH_NCCL := $(filter 1,$(NCCL))
SIMT_KERNELS := -include llmc/simt/simt.h -x c++
# SIMT_CHECK=1: with the checker, whose own functions stand in for those of the thread sanitizer.
ifeq ($(SIMT_CHECK),1)
  SIMT_CHECKER := checker.o
  INSTRUMENT := -DSIMT_CHECK -O2 -fsanitize=thread --param tsan-instrument-func-entry-exit=0 -Wno-tsan
endif
EMULATOR := simt.o runtime.o $(SIMT_CHECKER) cublaslt.o $(WITH_NCCL:%=nccl.o)
$(SIMT)/tests: $(addprefix $(SIMT)/,$(EMULATOR) comm_nccl.o attention_cudnn.o ops.o product.o test_simt.o test_kernels.o test_attention_kernels.o \
                                    test_gemm_cuda.o $(WITH_NCCL:%=test_nccl.o) test_device_comms.o $(SIMT_CHECKER:%=test_%))
	$(CXX) $(filter-out -fopenmp,$(LDFLAGS)) -rdynamic $^ -o $@ -lgtest -lgtest_main
$(SIMT)/%.o: llmc/simt/%.cpp $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(SIMT_CHECKER:%.o=-DSIMT_CHECK) -c $< -o $@
$(SIMT)/ops.o: llmc/ops.cu $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) -O1 $(SIMT_KERNELS) $(INSTRUMENT) -c $< -o $@
$(SIMT)/%.o: dev/test/%.cu $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(COLD) $(SIMT_KERNELS) $(INSTRUMENT) -c $< -o $@
$(addprefix $(SIMT)/,test_simt.o test_checker.o): $(SIMT)/%.o: dev/test/%.cpp $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(COLD) $(SIMT_KERNELS) $(INSTRUMENT) -c $< -o $@
$(SIMT)/%.o: dev/test/%.cpp $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(COLD) $(INSTRUMENT) -c $< -o $@
$(SIMT)/%.o: llmc/%.cpp $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(COLD) $(MPI_CFLAGS) -c $< -o $@
$(SIMT)/train_gpt.o $(SIMT)/test_gpt.o: $(SIMT)/%.o: %.cu $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(COLD) -x c++ -c $< -o $@
$(SIMT):
	mkdir -p $@
simt_tests: $(SIMT)/tests
simt_check:
	$(MAKE) BUILD=build/check SIMT_CHECK=1 build/check/simt/tests build/check/simt/test_gpt
coverage:
	$(MAKE) BUILD=build/coverage COVERAGE=1 build/coverage/simt/tests build/coverage/simt/test_gpt
	rm -f build/coverage/simt/*.gcda
	build/coverage/simt/tests --gtest_brief=1
	build/coverage/simt/test_gpt
	SIMT_DEVICES=4 build/coverage/simt/test_gpt --recompute 2 --zero 1 --dtype bf16 --grad-dtype bf16
	dev/coverage.py build/coverage/simt
# Kernel experiments (dev/kernels).
$(SIMT)/%.o: dev/kernels/%.cu $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) -O1 $(SIMT_KERNELS) $(INSTRUMENT) -c $< -o $@
$(SIMT)/lab.o: dev/kernels/lab.cpp $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(COLD) $(INSTRUMENT) -c $< -o $@
$(SIMT)/lab: $(addprefix $(SIMT)/,simt.o runtime.o residual_norm.o lab.o)
	$(CXX) $(filter-out -fopenmp,$(LDFLAGS)) -rdynamic $^ -o $@ -lgtest

# The programs of the CUDA build, with the emulator in the place of CUDA's libraries.
CUDA_HOST := $(addprefix $(SIMT)/,comm_mpi.o comm_nccl.o launch.o flags.o) $(DATA_OBJECTS)
$(SIMT)/train_gpt $(SIMT)/test_gpt: %: %.o $(CUDA_HOST) $(addprefix $(SIMT)/,attention_cudnn.o ops.o $(EMULATOR))
	$(CXX) $(filter-out -fopenmp,$(LDFLAGS)) -rdynamic $^ -o $@ $(filter-out -ldnnl,$(LDLIBS)) -lsentencepiece -lxxhash
train_gpt_simt test_gpt_simt: %_simt: $(SIMT)/%
	ln -f $< $@
simt: train_gpt_simt test_gpt_simt
# The calls of a step again, timed: dev/gpu_check.sh.
$(SIMT)/step_ops.o: dev/roofline/step_ops.cpp $(BUILD)/traced_ops.h $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) -O0 -I$(BUILD) -c $< -o $@
$(SIMT)/step_ops: $(SIMT)/step_ops.o $(CUDA_HOST) $(addprefix $(SIMT)/,attention_cudnn.o ops.o $(EMULATOR))
	$(CXX) $(filter-out -fopenmp,$(LDFLAGS)) -rdynamic $^ -o $@ $(filter-out -ldnnl,$(LDLIBS)) -lsentencepiece -lxxhash
$(SIMT)/%.o: dev/bench/%.cpp $(BUILD)/flags.txt | $(SIMT)
	$(CXX) $(SIMT_FLAGS) $(COLD) $(INSTRUMENT) -c $< -o $@
$(SIMT)/bench_attention: $(addprefix $(SIMT)/,bench_attention.o attention_cudnn.o ops.o $(EMULATOR))
	$(CXX) $(filter-out -fopenmp,$(LDFLAGS)) -rdynamic $^ -o $@

# The kernels by nvcc. What ptxas says of each goes to a log; the report fails where registers are spilled.
CUDA_ARCHS ?= 90
NVCCFLAGS := -std=c++20 -O3 --expt-relaxed-constexpr -DLLMC_CUDA -I. -Werror all-warnings -Xcompiler -Wall,-Wextra -Xptxas -v
NVCC = $(CUDA)/bin/nvcc $(NVCCFLAGS) -arch=sm_$* -c $< -o $(@:.log=.o) 2> $@.part || { cat $@.part; exit 1; }; mv $@.part $@
KERNEL_HEADERS := $(wildcard llmc/*.h llmc/ops/*.cuh)
$(BUILD)/cuda/ops_sm_%.log: llmc/ops.cu $(KERNEL_HEADERS) | $(BUILD)/cuda
	$(NVCC)
$(BUILD)/cuda/product_sm_%.log: dev/test/product.cu dev/test/product.cuh $(KERNEL_HEADERS) | $(BUILD)/cuda
	$(NVCC)
$(BUILD)/cuda/residual_norm_sm_%.log: dev/kernels/residual_norm.cu dev/kernels/lab.h $(KERNEL_HEADERS) | $(BUILD)/cuda
	$(NVCC)
$(BUILD)/cuda:
	mkdir -p $@
kernels: $(foreach arch,$(CUDA_ARCHS),$(BUILD)/cuda/ops_sm_$(arch).log $(BUILD)/cuda/product_sm_$(arch).log $(BUILD)/cuda/residual_norm_sm_$(arch).log)
	dev/ptxas_report.py $^
$(BUILD)/cuda/lab: $(SIMT)/lab.o $(BUILD)/cuda/residual_norm_sm_$(firstword $(CUDA_ARCHS)).log
	$(CXX) $(filter-out -fopenmp,$(LDFLAGS)) $(^:.log=.o) -o $@ -L$(CUDA)/lib64 -Wl,-rpath,$(CUDA)/lib64 -lcudart
# The tests of the kernels on a GPU, against the CPU loops: the emulated build's objects, which are host code, with nvcc's kernels.
$(BUILD)/cuda/tests: $(addprefix $(SIMT)/,test_kernels.o test_attention_kernels.o test_gemm_cuda.o attention_cudnn.o) $(foreach part,ops product,$(BUILD)/cuda/$(part)_sm_$(firstword $(CUDA_ARCHS)).log)
	$(CXX) $(filter-out -fopenmp,$(LDFLAGS)) $(^:.log=.o) -o $@ -L$(CUDA)/lib64 -Wl,-rpath,$(CUDA)/lib64 -lcublasLt -lcudart -lgtest -lgtest_main
kernels_lab: $(SIMT)/lab $(if $(wildcard $(CUDA)/bin/nvcc),$(BUILD)/cuda/lab)

# The programs of the CUDA build: the host code of the emulated build, nvcc's kernels, CUDA's libraries.
ARCH ?= 90
CUDA_OPS := $(BUILD)/cuda/ops_sm_$(firstword $(ARCH)).log
ifneq ($(word 2,$(ARCH)),)
  CUDA_OPS := $(BUILD)/cuda/ops_$(shell echo $(ARCH) | tr ' ' _).o
$(CUDA_OPS): llmc/ops.cu $(KERNEL_HEADERS) | $(BUILD)/cuda
	$(CUDA)/bin/nvcc $(filter-out -Xptxas -v,$(NVCCFLAGS)) $(foreach arch,$(ARCH),-gencode arch=compute_$(arch),code=sm_$(arch)) -c $< -o $@
endif
# Attention by cuDNN: one object, or the one that says that there is none. Which of them the programs were linked with is kept in a file.
CUDNN_FRONTEND ?= build/cudnn_frontend
CUDNN_FLAGS = $(SIMT_FLAGS) -DLLMC_CUDNN=1 -isystem $(CUDNN_FRONTEND)/include
WITH_CUDNN := $(filter 1,$(CUDNN))
ATTENTION := $(if $(WITH_CUDNN),$(BUILD)/cuda,$(SIMT))/attention_cudnn.o
ifneq ($(WITH_CUDNN),)
ifeq ($(wildcard $(CUDNN_FRONTEND)/include/cudnn_frontend.h),)
  $(error CUDNN=1: no $(CUDNN_FRONTEND)/include/cudnn_frontend.h. HINT: scripts/cudnn_frontend.sh gets it; CUDNN_FRONTEND=folder names another)
endif
endif
$(BUILD)/cuda/attention_cudnn.o: llmc/attention_cudnn.cpp $(BUILD)/flags.txt | $(BUILD)/cuda
	$(CXX) $(CUDNN_FLAGS) -DCUDNN_FRONTEND_SKIP_JSON_LIB -O1 -c $< -o $@
$(BUILD)/cuda/linked_with.txt: FORCE | $(BUILD)/cuda
	@echo '$(ATTENTION)' | cmp -s - $@ || echo '$(ATTENTION)' > $@
LINK_CUDA = $(CXX) $(filter-out -fopenmp,$(LDFLAGS)) $(patsubst %.log,%.o,$(filter %.o %.log,$^)) -o $@ \
  -L$(CUDA)/lib64 -Wl,-rpath,$(CUDA)/lib64 -lcudart -lcublasLt $(WITH_NCCL:%=-lnccl) $(WITH_CUDNN:%=-lcudnn -lnvrtc)
CUDA_PARTS := $(ATTENTION) $(CUDA_OPS) $(BUILD)/cuda/linked_with.txt
train_gpt_cuda test_gpt_cuda: %_cuda: $(SIMT)/%.o $(CUDA_HOST) $(CUDA_PARTS)
	$(LINK_CUDA) $(filter-out -ldnnl,$(LDLIBS)) -lsentencepiece -lxxhash
$(BUILD)/cuda/step_ops: $(SIMT)/step_ops.o $(CUDA_HOST) $(CUDA_PARTS)
	$(LINK_CUDA) $(filter-out -ldnnl,$(LDLIBS)) -lsentencepiece -lxxhash
# Our attention against cuDNN's.
$(BUILD)/cuda/bench_attention: $(SIMT)/bench_attention.o $(CUDA_PARTS)
	$(LINK_CUDA)
# The graphs that cuDNN is given, read and computed on the CPU: needs cuDNN and the headers, no GPU.
$(BUILD)/cuda/test_attention_cudnn: dev/test/test_attention_cudnn.cpp llmc/attention_cudnn.cpp $(BUILD)/flags.txt | $(BUILD)/cuda
	$(CXX) $(CUDNN_FLAGS) -O0 $< -o $@ -L$(CUDA)/lib64 -Wl,-rpath,$(CUDA)/lib64 -lcudnn -lnvrtc -lcudart -lgtest -lgtest_main
cuda: train_gpt_cuda test_gpt_cuda

test:
	dev/test/run_tests.sh
bench: all $(BUILD)/step_ops $(BUILD)/bench_limit
	dev/bench/bench.py
demo:
	scripts/quickstart.sh

# .cu files are C++ here: ops and the trainer build for the CPU without nvcc. Only ops are hot; the rest compiles
# faster at -O1, and under a sanitizer, which multiplies the code, at -O0.
COLD := $(if $(SANITIZE),-O0,-O1)
HOT := $(if $(SANITIZE),-O1)
$(BUILD)/flags.o: HOT := $(COLD)
$(BUILD)/%.o: %.cu $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) $(COLD) -x c++ -c $< -o $@
$(BUILD)/%.o: llmc/%.cu $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) $(HOT) -x c++ -c $< -o $@
$(BUILD)/%.o: llmc/%.cpp $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) $(HOT) $(MPI_CFLAGS) -c $< -o $@
$(BUILD)/%.o: data/%.cpp $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) $(COLD) -c $< -o $@
$(BUILD)/%.o: dev/test/%.cpp $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) $(COLD) -c $< -o $@
$(BUILD)/%.o: dev/fuzz/%.cpp $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) $(COLD) -c $< -o $@
$(BUILD)/%.o: dev/bench/%.cpp $(BUILD)/flags.txt
	$(CXX) $(CXXFLAGS) -c $< -o $@

# Other flags, another compiler or another machine (MARCH) make everything anew.
BUILT_WITH := $(CXX) $(CXXFLAGS) $(LDLIBS) NCCL $(NCCL) $(shell $(CXX) -march=$(MARCH) -Q --help=target 2>/dev/null | cksum)
$(BUILD)/flags.txt: FORCE
	@mkdir -p $(BUILD)
	@echo '$(BUILT_WITH)' | cmp -s - $@ || echo '$(BUILT_WITH)' > $@

# Warnings do not change what is built.
ifeq ($(WERROR),1)
  CXXFLAGS += -Werror
endif

clean:
	rm -rf build train_gpt test_gpt tokenize train_gpt_simt test_gpt_simt train_gpt_cuda test_gpt_cuda

-include $(wildcard $(BUILD)/*.d $(SIMT)/*.d $(BUILD)/cuda/*.d)
