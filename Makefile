# Every target creates or refreshes the environment it needs; `make` alone explains them.

# These count from make's command line only. What a shell has set under one of these names is for something else: it is
# no argument of a run, and chooses nothing that is made or removed. PYTHON stays: it only chooses an interpreter.
ARGUMENTS := MODEL TASK DATA DEVICE PROCESSES PRESET NAME ARGS TOPOLOGY BATCH EFFORT PROGRAM OUT DATASET MODEL_DIR TO WITH BENCH RUNS \
	PORT TPU ZONE PROJECT RUN ENV RETRIES ENGINE BUCKET LAUNCH_ARGS GET_PYTHON VENV LIBTPU_VERSION
ifneq ($(findstring e,$(filter-out --%,$(firstword -$(MAKEFLAGS)))),)
$(error make -e lets variables of the shell choose what is made and removed; leave out -e)
endif
IGNORED := $(strip $(foreach name,$(ARGUMENTS),$(if $(findstring environment,$(origin $(name))),$(name))))
# Emptied rather than undefined, which the make of a Mac, 3.81, cannot do.
$(foreach name,$(IGNORED),$(eval $(name) :=)$(eval unexport $(name)))
ifneq ($(and $(IGNORED),$(filter 0,$(MAKELEVEL))),)
$(shell echo 'note: not taken from the environment: $(IGNORED); give them after make, as make train MODEL=bert' >&2)
endif

# The first of these that is there: packages for all three are pinned, see requirements.txt. true: where the last is not,
# make takes the shell's 127 for its own failure and drops what it has said.
ifeq ($(origin PYTHON),undefined)
PYTHON := $(firstword $(shell for python in python3.11 python3.12 python3.13; do $$python -c 1 2>&- && echo $$python; done; true) python3.11)
endif
# Plain PyTorch needs less; an environment that has all serves it, too. Other targets need XLA, or the tools of tests.
# TorchTPU needs another torch than torch_xla: an environment of its own.
EAGER  := $(if $(filter-out install train grid data translate predict copy,$(MAKECMDGOALS)),,$(filter cpu cuda tpu,$(DEVICE)))
TORCH_TPU := $(filter tpu,$(EAGER))
ifneq ($(origin VENV),command line)
EAGER_VENV := $(if $(wildcard .venv/.installed),.venv,.venv-eager)
VENV   := $(if $(TORCH_TPU),.venv-tpu,$(if $(EAGER),$(EAGER_VENV),.venv))
endif
NEEDED := requirements$(if $(EAGER),$(if $(filter .venv,$(VENV)),,-eager)).txt
XLA    := $(if $(findstring eager,$(NEEDED)),,yes)
# A model's script, and the arguments that choose it there. MODEL= takes one of these names.
SCRIPT_resnet50 := resnet50
SCRIPT_dlrm     := dlrm
SCRIPT_transformer := transformer
# The encoders, as their list says: a line each of ENCODERS in optional.py.
ENCODERS := $(shell sed -n 's/^    "\(.*\)": "models\.encoders\..*/\1/p' optional.py 2>/dev/null)
# Of their tasks, those that have a script of their own, task=script, as SCRIPTS_OF_TASKS there says; others are GLUE's.
TASK_SCRIPTS := $(shell sed -n 's/^    "\(.*\)": "train\.\(.*\)",$$/\1=\2/p' optional.py 2>/dev/null)
OWN_SCRIPT := $(if $(TASK),$(patsubst $(TASK)=%,%,$(filter $(TASK)=%,$(TASK_SCRIPTS))))
GLUE_TASK := $(if $(OWN_SCRIPT),,$(TASK))
# Those of data/glue.py.
GLUE_TASKS := cola sst2 mrpc stsb qqp mnli qnli rte wnli
TASKS := $(GLUE_TASKS) $(foreach pair,$(TASK_SCRIPTS),$(firstword $(subst =, ,$(pair))))
$(foreach model,$(ENCODERS),$(eval SCRIPT_$(model) := $(or $(OWN_SCRIPT),glue)))
MODELS := resnet50 dlrm transformer $(ENCODERS)
BENCHES := $(patsubst bench/%.py,%,$(filter-out bench/__init__.py,$(wildcard bench/*.py)))

# Data sets that are prepared before training, and their programs.
DATASET_clicks := clicks
DATASET_criteo := criteo
DATASET_wmt18  := wmt
DATASET_text   := text
DATASET_images := images
DATASETS := $(sort $(patsubst DATASET_%,%,$(filter DATASET_%,$(.VARIABLES))))

# Without DATA a run is a trial: the small preset on synthetic data. With it, the recipe that most people can run. DLRM's
# script chooses by what DATA holds: kaggle, or clicks for a log of your own.
PRESET_dlrm :=
PRESET_transformer := base
ifneq ($(origin PRESET),command line)
PRESET := $(if $(DATA),$(if $(filter file,$(origin PRESET_$(MODEL))),$(PRESET_$(MODEL)),full),tiny)
endif
INSTALLED := $(VENV)/.installed

# The libtpu of a machine with TPU chips is the pinned one, or that of LIBTPU_VERSION=, an argument of make alone. The
# environment remembers that choice, so that a later command does not bring the pinned one back. Of `make compile` the
# argument chooses the compiler, and changes no environment. CHIPS=yes is for an image.
CHIPS := $(wildcard /dev/accel* /dev/vfio/[0-9]*)
LIBTPU_CHOICE := $(VENV)/.libtpu_version
LIBTPU_ASKED := $(if $(filter command,$(origin LIBTPU_VERSION)),$(LIBTPU_VERSION))
LIBTPU_GIVEN := $(if $(filter compile,$(MAKECMDGOALS)),,$(LIBTPU_ASKED))
LIBTPU_CHOSEN := $(or $(LIBTPU_GIVEN),$(file <$(LIBTPU_CHOICE)))
LIBTPU_FOLDERS := $(notdir $(wildcard $(VENV)/lib/python3*/site-packages/libtpu-*.dist-info))
LIBTPU_THERE := $(LIBTPU_FOLDERS:libtpu-%.dist-info=%)

PY := $(VENV)/bin/python
FAIRSEQ := .venv-fairseq
JAX := .venv-jax
NEWEST_TORCH := .venv-newest
LIBTPU := .libtpu
BOARD := .venv-board

.DEFAULT_GOAL := help
.PHONY: help install train grid copy translate predict data compile compile-all logs stop status board doctor accept test guards test-all test-newest bench lint clean fairseq fairseq-golden jax \
	check-model check-task check-task-name check-grid check-device check-no-device check-libtpu check-chips check-data check-translate check-predict check-bench

help:
	@echo 'make train MODEL=resnet50                    trial run: small preset, synthetic data, half a minute'
	@echo 'make train MODEL=resnet50 DATA=/data/images  the published recipe on real data (on a TPU VM: on its chips)'
	@echo 'make train MODEL=bert TASK=mrpc DATA=/data/glue  fine-tuning on a task of GLUE; TASK=pretrain: on text'
	@echo 'make grid MODEL=bert TASK=mrpc ARGS="--lr 2e-5 3e-5 5e-5 --seed 0 1 2"   a run for each combination, one after the'
	@echo '                                             other, and a table with the median and the deviation over the seeds'
	@echo 'make data DATASET=criteo DATA=/data/kaggle   raw files to what training reads, once: $(DATASETS)'
	@echo 'make translate MODEL_DIR=runs/x/export <in >out  text through a trained Transformer, a sentence a line'
	@echo 'make predict MODEL_DIR=runs/x/export DATA=new.csv   a line of JSON for each new picture, sentence, pair or click;'
	@echo '                                             OUT= writes a file; TASK=mrpc OUT=folder: test sets of GLUE for its server'
	@echo 'make train MODEL=bert DATA=… TPU=my-tpu      on all workers of that Cloud TPU; logs, stop, status TPU=my-tpu'
	@echo 'make copy MODEL=resnet50 TO=../mine          that script with exactly the files that it needs (for one DEVICE=) and a test,'
	@echo '                                             and with what it can do without: WITH="watch sharding hub_images shards predict"'
	@echo 'make board                                   all runs in a browser, by TensorBoard (RUNS=gs://bucket/runs, PORT=)'
	@echo 'make doctor                                  what is here, what is missing: each line ok, or what to do'
	@echo 'make accept TPU=my-tpu                       the first 15 minutes on a new kind of TPU: all that is promised, tried'
	@echo 'make compile MODEL=bert TOPOLOGY=v5e:2x4     does it fit that TPU? by its own compiler, on this machine'
	@echo 'make test                                    all tests: 10 to 15 minutes on two CPU cores'
	@echo 'make guards                                  the steps cost the TPU what they did, by its compiler: 7 to 18 minutes'
	@echo 'make test-all                                and the slow ones'
	@echo 'make test-newest                             plain PyTorch (DEVICE=cpu) on the newest torch, in $(NEWEST_TORCH)'
	@echo 'make bench BENCH=step_time                   a side-by-side benchmark: $(BENCHES)'
	@echo 'make lint                                    ruff'
	@echo 'make fairseq                                 fairseq in an environment of its own, $(FAIRSEQ): the reference'
	@echo 'make jax                                     JAX in an environment of its own, $(JAX): python -m research.jax_peers'
	@echo 'make install                                 only the environment, in $(VENV)'
	@echo 'make clean                                   remove the environments that make has made, and caches; runs/ stays'
	@echo
	@echo 'MODEL    one of: $(MODELS)'
	@echo 'TASK     of the encoders: cola, sst2, mrpc, stsb, qqp, mnli, qnli, rte, wnli: sentences; squad: answers in texts;'
	@echo '         ner: entities in sentences; pretrain'
	@echo 'DATA     folder, URL (gs://…), or id of a data set on the hub (see the docstring of train/<script>.py)'
	@echo 'DEVICE   xla: a TPU, or XLA on this CPU (default); cpu, cuda: plain PyTorch, without torch_xla; tpu: a TPU by'
	@echo '         TorchTPU, into .venv-tpu; never run (docs/torch_tpu.md)'
	@echo 'PROCESSES  of make train with DEVICE=cpu or cuda: so many, a device each (default: all GPUs; one on a CPU): docs/processes.md'
	@echo 'PRESET   full (resnet50: full, modern, finetune, mlperf;'
	@echo '         dlrm: kaggle, clicks, mlperf_v1, mlperf_v2;'
	@echo '         transformer: base, big, wmt18, tpu; TASK=pretrain: full, lamb) or tiny'
	@echo '         (default: the first of these with DATA, of dlrm the one for its data; tiny without)'
	@echo 'TOPOLOGY of make compile: v5e:1x1, v5e:2x4, … v6e:16x16, v4:2x2x1, v5p:2x2x1; a wrong one lists them; 2xv5e:2x4: two slices'
	@echo 'BATCH    of make compile: examples a device (default: the recipe'"'"'s, shared out); EFFORT: fast or full'
	@echo 'PROGRAM  of make compile: train (default), evaluate, or translate: the Transformer'"'"'s beam search'
	@echo 'OUT      folder that make data writes (default: prepared, in DATA); file of the figures of make compile; of make'
	@echo '         predict: file of the predictions (default: the standard output), with TASK a folder'
	@echo 'NAME     folder of the run below runs/; the same command resumes an unfinished run; of make grid: of all its runs'
	@echo 'TPU      name of a TPU VM (ZONE=, PROJECT=), ssh:host1,host2, or local; RUN= names the run, ENV="A=b" are its'
	@echo '         variables, RETRIES= how often it is started again after a crash; ENGINE=sky has SkyPilot find a TPU,'
	@echo '         and give it back after the run; see python3 -m tpu.launch --help. make grid takes several, TPU="tpu1 tpu2",'
	@echo '         each of which takes the next run'
	@echo 'ARGS     further flags of the script: ARGS="--epochs 10 --lr 0.05"; ARGS=--help lists them all'
	@echo 'PYTHON   interpreter of the environment, CPython 3.11, 3.12 or 3.13 (default: the first there); GET_PYTHON=1'
	@echo '         installs it, or its library alone, where it is missing, by apt on Ubuntu, as root'
	@echo 'LIBTPU_VERSION  another libtpu than $(ON_TPU_VMS), which TPU VMs run: for make compile, and on a machine with TPU chips;'
	@echo '         $(NEWEST) for TPU7x (docs/tpu.md)'

# A folder that make makes gets this before anything else is in it; `make clean` removes no other.
MARK := .made-by-make
mark = @[ -e '$(1)' ] || { mkdir -p '$(1)' && : > '$(1)/$(MARK)'; }

# An installation says what it does: a line before each step, and on a terminal what pip says. PIP_VERBOSE=1 takes
# --quiet back.
pip = [ ! -t 1 ] || export PIP_VERBOSE=1; $(1)/bin/pip install --disable-pip-version-check --quiet
INSTALL_STEPS := $(words environment packages torchrec $(and $(XLA),$(CHIPS),libtpu) $(if $(XLA),import))

# Another torch than the pinned one, for plain PyTorch: all lines of a file but those of torch are installed with it.
without_torch = grep -v '^torch' $(1) | { $(call pip,$(2)) -r /dev/stdin $(foreach file,$(3),-r $(file)); }

# TorchTPU's environment has no torchrec, see requirements-newest.txt.
ifneq ($(TORCH_TPU),)
$(INSTALLED): requirements-eager.txt requirements-newest.txt requirements-torch-tpu.txt | check-device
	$(call mark,$(VENV))
	@rm -f $@
	@echo 'installing TorchTPU and a torch for it into $(VENV): 8 GB; it has never been run with this project, see docs/torch_tpu.md'
	@$(PYTHON) -m venv $(VENV)
	@$(call without_torch,requirements-eager.txt,$(VENV),requirements-newest.txt requirements-torch-tpu.txt)
	touch $@
else
# The environment is done when the stamp is there: an install that was cut off starts over. On TPU VMs the launcher gives
# GET_PYTHON=1.
$(INSTALLED): $(NEEDED) requirements-torchrec.txt requirements-tpu.txt | check-device check-chips
	@works() { $(PYTHON) -c 'import ensurepip, sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2>&-; }; \
		has_library() { $(if $(XLA),$(PYTHON) -m tpu.libpython,true); }; \
		{ works && has_library 2>/dev/null; } || [ -z '$(GET_PYTHON)' ] || sh tpu/get_python.sh '$(PYTHON)'; \
		works || \
		{ echo 'error: CPython 3.11, 3.12 or 3.13 is needed, $(PYTHON) is not it; use PYTHON=/path/to/python3.11 that has venv,' \
			'or on Ubuntu GET_PYTHON=1, which installs one as root' >&2; exit 2; }; \
		has_library
	$(call mark,$(VENV))
	@rm -f $@
	@echo 'setting up $(VENV), once: about 6 minutes on two cores, 8 GB of disk, and as much again for downloads meanwhile'
	@echo '1 of $(INSTALL_STEPS): the environment'
	@$(PYTHON) -m venv $(VENV)
	@echo '2 of $(INSTALL_STEPS): PyTorch, transformers and all else in $(NEEDED), nearly all of the time (CUDA comes with' \
		'PyTorch); once all is here pip unpacks for minutes without a word'
	@$(call pip,$(VENV)) -r $(NEEDED)
	@echo '3 of $(INSTALL_STEPS): torchrec'
	@$(call pip,$(VENV)) --no-deps -r requirements-torchrec.txt
	@$(if $(and $(XLA),$(CHIPS)),echo '4 of $(INSTALL_STEPS): libtpu for the chips that are here')
	@$(if $(and $(XLA),$(CHIPS)),$(call pip,$(VENV)) \
		$(if $(LIBTPU_CHOSEN),libtpu==$(LIBTPU_CHOSEN),-r requirements-tpu.txt))
	$(if $(and $(XLA),$(CHIPS),$(LIBTPU_CHOSEN)),echo $(LIBTPU_CHOSEN) >$(LIBTPU_CHOICE))
	@$(if $(XLA),echo '$(INSTALL_STEPS) of $(INSTALL_STEPS): torch_xla is imported to see whether it works')
	$(if $(XLA),$(PY) -m tpu.libpython install)
	touch $@
endif

# Another libtpu than the one that is there.
ifneq ($(LIBTPU_GIVEN),)
ifneq ($(LIBTPU_GIVEN) $(LIBTPU_GIVEN),$(LIBTPU_THERE) $(file <$(LIBTPU_CHOICE)))
$(INSTALLED): anew
.PHONY: anew
endif
endif

# The client of --tracker wandb, which tests use offline.
WANDB := $(VENV)/.wandb
$(WANDB): requirements-wandb.txt | $(INSTALLED)
	@echo 'installing the client of Weights & Biases into $(VENV)'
	@$(call pip,$(VENV)) -r requirements-wandb.txt
	touch $@

install: $(INSTALLED)

# A signal to make alone (timeout, systemd, kill) reaches its child, which is a shell where a line has quotes. dash waits
# for the program below it and dies of the signal without it; bash becomes the program. The lines stay as one may copy them.
BASH := $(firstword $(wildcard /bin/bash /usr/bin/bash /usr/local/bin/bash))
ifneq ($(BASH),)
train data translate predict accept bench: SHELL := $(BASH)
endif

# make ends with 2 for every failure. What has started it to learn how the trainer ended names a file for its exit code in
# XLA_ZOO_EXIT_CODE, as tpu/launch/keeper.py and tpu/entry.py do; 2 stands there for an argument that is refused here.
# exec: a shell between make and that program would end at once by the SIGTERM that make hands on, and make with it.
RECORDED := $(if $(XLA_ZOO_EXIT_CODE),exec sh tpu/exit_code.sh )
refuse = $(if $(XLA_ZOO_EXIT_CODE),echo 2 >"$$XLA_ZOO_EXIT_CODE"; )exit 2

# Checked before anything is installed.
check-model: check-device check-libtpu
	@test -n '$(SCRIPT_$(MODEL))' || { echo "error: MODEL=$$MODEL is not known; MODEL is one of: $(MODELS)" >&2; $(refuse); }
	@test -z '$(and $(filter dlrm,$(MODEL)),$(TORCH_TPU))' || \
		{ echo "error: MODEL=dlrm is not for DEVICE=tpu: torchrec, which it needs, has no release for the torch of TorchTPU;" \
			"leave out DEVICE=tpu" >&2; $(refuse); }

check-task: check-model check-task-name
ifneq ($(TASK),)
	@test -n '$(filter $(MODEL),$(ENCODERS))' || \
		{ echo "error: TASK=$$TASK is for the encoders, and MODEL=$$MODEL has one task: leave it out" >&2; $(refuse); }
endif

check-task-name:
ifneq ($(TASK),)
	@case ' $(TASKS) ' in *" $$TASK "*) test '$(words $(TASK))' = 1;; *) false;; esac || \
		{ echo "error: TASK=$$TASK is not known; TASK is one of: $(TASKS)" >&2; $(refuse); }
endif

check-device:
	@case "$$DEVICE" in ''|xla|cpu|cuda|tpu) ;; \
		*) echo "error: DEVICE=$$DEVICE is not known; DEVICE is one of: xla cpu cuda tpu" >&2; $(refuse);; esac
	@test -z "$$PROCESSES" -o -n '$(and $(filter cpu cuda,$(EAGER)),$(filter train,$(MAKECMDGOALS)))' || \
		{ echo "error: PROCESSES=$$PROCESSES is for make train with DEVICE=cpu or cuda; leave it out" >&2; $(refuse); }

# Targets that are for XLA alone, or choose a device by flags of their own.
check-no-device: check-device
	@test -z '$(filter-out xla,$(DEVICE))' || \
		{ echo "error: DEVICE=$$DEVICE is not for make $(firstword $(MAKECMDGOALS)); leave it out" >&2; $(refuse); }

check-libtpu:
ifneq ($(LIBTPU_ASKED),)
	@case "$$LIBTPU_VERSION" in *[!0-9.]* | .* | *. | *..* | *.*.*.*) false ;; *.*.*) ;; *) false ;; esac || \
		{ echo "error: LIBTPU_VERSION=$$LIBTPU_VERSION is no version of libtpu; give three numbers, such as 0.0.51" >&2; $(refuse); }
endif

check-chips: check-libtpu
ifneq ($(LIBTPU_GIVEN),)
	@test -n '$(and $(XLA),$(CHIPS))' || \
		{ echo "error: LIBTPU_VERSION=$$LIBTPU_VERSION is for XLA on a machine with TPU chips, and" \
			"$(if $(XLA),no chip is here,DEVICE=$$DEVICE is without XLA); leave it out" >&2; $(refuse); }
endif

# What make was given is in the shell's environment, too: "$$DATA" keeps every space and quote in it.
# With TPU= a run starts on that TPU's workers, each of which does `make train` without it. TPU=local is this machine.
given = $(and $($(1)),$(filter command environment,$(origin $(1))))
passed = $(foreach name,$(1),$(if $(call given,$(name)),"$(name)=$$$(name)"))
# What a script gets of them.
RUN_FLAGS = $(PRESET) $(if $(filter $(MODEL),$(ENCODERS)),--model $(MODEL) $(if $(GLUE_TASK),--task $(GLUE_TASK))) \
	$(if $(DATA),--data "$$DATA") $(if $(call given,NAME),--name "$$NAME") $(if $(DEVICE),--device "$$DEVICE") $(ARGS)
TRACKERS = $(if $(findstring tracker wandb,$(subst =, ,$(ARGS))),$(WANDB))
# Plain PyTorch has a process for each device: by default one on a CPU, and all GPUs.
AT_ONCE = $(if $(EAGER),$(if $(PROCESSES),"$$PROCESSES",$(if $(filter cuda,$(DEVICE)),gpus)))
START = $(if $(AT_ONCE),train.common.start_processes $(AT_ONCE) )
ON_TPUS = $(filter-out local,$(TPU))
ifneq ($(ON_TPUS),)
train: check-task
	@test -z '$(EAGER)' || \
		{ echo "error: DEVICE=$$DEVICE runs on devices of this machine, not on TPU=$$TPU; leave out one of them" >&2; exit 2; }
	@python3 -m tpu.launch train --tpu "$$TPU" $(if $(ZONE),--zone "$$ZONE") $(if $(PROJECT),--project "$$PROJECT") \
		$(if $(call given,RUN),--run "$$RUN") $(if $(call given,ENV),--env-from ENV) $(if $(RETRIES),--retries "$$RETRIES") \
		$(LAUNCH_ARGS) -- \
		$(call passed,MODEL TASK PRESET DATA NAME ARGS PYTHON GET_PYTHON LIBTPU_VERSION)
else ifeq ($(ENGINE),sky)
# SkyPilot holds the TPU, in whatever zone has one: see tpu/sky.yaml, which takes these variables.
SKY := MODEL TASK PRESET DATA ARGS
train: check-task
	@test -z '$(filter command,$(foreach name,ZONE PROJECT ENV RETRIES NAME PYTHON DEVICE LIBTPU_VERSION,$(origin $(name))))' || \
		{ echo 'error: ENGINE=sky takes $(SKY) BUCKET RUN only; what TPU it asks for, where and how stands in tpu/sky.yaml' >&2; exit 2; }
	@test -n "$$BUCKET" -a -n "$$RUN" || \
		{ echo 'error: ENGINE=sky needs BUCKET=gs://my-bucket for the runs, and RUN= to find the run again' >&2; exit 2; }
	sky jobs launch tpu/sky.yaml --yes --env NAME="$$RUN" --env BUCKET="$$BUCKET" \
		$(foreach name,$(SKY),$(if $(call given,$(name)),--env "$(name)=$$$(name)")) $(if $(HF_TOKEN),--secret HF_TOKEN) $(LAUNCH_ARGS)
else
train: check-task $(INSTALLED) $(TRACKERS)
	$(RECORDED)$(PY) -m $(START)train.$(SCRIPT_$(MODEL)) $(RUN_FLAGS)
endif

# A run for each combination of values in ARGS, and a table. What it is given is checked before anything is installed. On
# TPUs it is a program of this machine, which checks more where there is an environment, and needs none.
# As of RECORDED: a shell would end by the SIGTERM that make hands on, and make with it, while the grid trains on.
STOPPABLE = $(if $(RECORDED),$(RECORDED),exec )
GRID_WORDS = $(SCRIPT_$(MODEL)) $(RUN_FLAGS)
GRID_TPUS = --tpu "$$TPU" $(if $(ZONE),--zone "$$ZONE") $(if $(PROJECT),--project "$$PROJECT") \
	--launch-args="$(if $(call given,ENV),--env-from ENV) $(if $(RETRIES),--retries $$RETRIES) $$LAUNCH_ARGS" \
	$(foreach name,PYTHON GET_PYTHON LIBTPU_VERSION,$(if $(call given,$(name)),--word "$(name)=$$$(name)"))

check-grid: check-task
	@test -z '$(ENGINE)' || { echo "error: ENGINE=$$ENGINE is for make train; a grid takes TPU=" >&2; $(refuse); }
	@python3 -m train.grid --check $(if $(ON_TPUS),$(GRID_TPUS)) $(GRID_WORDS) || { $(refuse); }

ifneq ($(ON_TPUS),)
grid: check-grid
	@test -z '$(EAGER)' || \
		{ echo "error: DEVICE=$$DEVICE runs on devices of this machine, not on TPU=$$TPU; leave out one of them" >&2; exit 2; }
	@$(STOPPABLE)python3 -m train.grid $(GRID_TPUS) $(if $(wildcard $(INSTALLED)),--python $(PY)) $(GRID_WORDS)
else
grid: check-grid $(INSTALLED) $(TRACKERS)
	@$(STOPPABLE)$(PY) -m train.grid $(GRID_WORDS)
endif

logs stop status:
	@test -n "$$TPU" || { echo 'error: TPU is missing; give the TPU that the run is on: make $@ TPU=my-tpu' >&2; exit 2; }
	@python3 -m tpu.launch $@ --tpu "$$TPU" $(if $(ZONE),--zone "$$ZONE") $(if $(PROJECT),--project "$$PROJECT") \
		$(if $(RUN),--run "$$RUN") $(LAUNCH_ARGS)

# A script with the files that it needs, in a folder of its own. It needs no environment.
copy: check-model
	@test -n "$$TO" || { echo "error: TO is missing; give a new folder: make copy MODEL=$$MODEL TO=../mine" >&2; exit 2; }
	@$(PYTHON) copy_model.py "$$MODEL" $(if $(TASK),--task "$$TASK") $(if $(DEVICE),--device "$$DEVICE") $(if $(WITH),--with "$$WITH") --to="$$TO"

# What is here and what is missing, before anything is installed.
doctor: check-no-device $(if $(MODEL),check-task,check-task-name)
	@$(RECORDED)python3 -m tpu.doctor --python "$(PYTHON)" $(if $(DATA),--data "$$DATA") $(if $(SCRIPT_$(MODEL)),--script $(SCRIPT_$(MODEL))) \
		$(if $(GLUE_TASK),--task "$$TASK") $(if $(TPU),--tpu "$$TPU") $(if $(ZONE),--zone "$$ZONE") \
		$(if $(PROJECT),--project "$$PROJECT") $(ARGS)

# What is promised, tried on a TPU, or on this machine without TPU=. Runs install what they need.
accept: check-no-device
	@python3 -m tpu.accept --python "$(PYTHON)" $(if $(TPU),--tpu "$$TPU") $(if $(ZONE),--zone "$$ZONE") \
		$(if $(PROJECT),--project "$$PROJECT") $(if $(RUNS),--runs "$$RUNS") $(if $(OUT),--out "$$OUT") $(ARGS)

# Checked before anything is installed.
check-data:
	@test -n '$(DATASET_$(DATASET))' || \
		{ echo "error: DATASET=$$DATASET is not known; DATASET is one of: $(DATASETS)" >&2; exit 2; }
	@test -n "$$DATA" || { echo 'error: DATA is missing; give the folder of the files to prepare' >&2; exit 2; }

data: check-data $(INSTALLED)
	$(PY) -m data.prepare.$(DATASET_$(DATASET)) --data "$$DATA" $(if $(OUT),--out "$$OUT") $(ARGS)

check-translate:
	@test -n "$$MODEL_DIR" || { echo 'error: MODEL_DIR is missing; give an export, MODEL_DIR=runs/<name>/export' >&2; exit 2; }

# What is not a translation goes to the standard error.
translate: check-translate
	@$(MAKE) --no-print-directory install >&2
	@$(PY) -m train.translate text --model-dir "$$MODEL_DIR" $(if $(DEVICE),--device "$$DEVICE") $(ARGS)

check-predict: check-device
	@test -n "$$MODEL_DIR" || { echo 'error: MODEL_DIR is missing; give an export, MODEL_DIR=runs/<name>/export' >&2; exit 2; }
	@test -n "$$DATA" || [ ! -t 0 ] || { echo 'error: DATA is missing; give a file or folder, or DATA=- for the standard input' >&2; exit 2; }
	@test -z "$$TASK" -o -n "$$OUT" || { echo 'error: OUT is missing; with TASK=, give a folder for the files of the submission' >&2; exit 2; }

# What is not a prediction goes to the standard error.
predict: check-predict
	@$(MAKE) --no-print-directory install >&2
	@$(RECORDED)$(PY) -m train.predict new --model-dir "$$MODEL_DIR" $(if $(DATA),--data "$$DATA") $(if $(OUT),--out "$$OUT") \
		$(if $(TASK),--task "$$TASK") $(if $(DEVICE),--device "$$DEVICE") $(ARGS)

# The TPU's compiler, a folder per version, apart from the environment: training does not need it, and on a TPU VM
# torch_xla has one of its own.
$(LIBTPU)/%/.installed: | $(INSTALLED)
	$(call mark,$(LIBTPU))
	@echo 'installing libtpu $*, the compiler of TPUs, into $(LIBTPU)/$*'
	@$(call pip,$(VENV)) --no-deps --upgrade --target $(LIBTPU)/$* libtpu==$*
	touch $@

# What a TPU VM compiles with, and the newest, which guards and figures are of besides.
pinned = $(shell sed -n 's/^libtpu==\([0-9.]*\).*/\1/p' $(1))
ON_TPU_VMS := $(call pinned,requirements-tpu.txt)
NEWEST     := $(call pinned,requirements-compile.txt)
BOTH_COMPILERS := $(foreach version,$(ON_TPU_VMS) $(NEWEST),$(LIBTPU)/$(version)/.installed)
COMPILER := $(or $(LIBTPU_ASKED),$(ON_TPU_VMS))

compile: check-no-device check-task $(INSTALLED) $(LIBTPU)/$(COMPILER)/.installed
	$(RECORDED)$(PY) -m tpu.compiler.compile $(MODEL) $(if $(filter file,$(origin PRESET)),,$(PRESET)) $(if $(TASK),--task $(TASK)) \
		$(if $(TOPOLOGY),--topology "$(TOPOLOGY)") $(if $(BATCH),--batch "$(BATCH)") $(if $(EFFORT),--effort "$(EFFORT)") $(if $(and $(TPU_LIBRARY_PATH),$(if $(LIBTPU_ASKED),,unasked)),,--libtpu $(COMPILER)) \
		$(if $(call given,PROGRAM),--program "$(PROGRAM)") $(if $(call given,OUT),--json "$(OUT)") $(if $(ARGS),-- $(ARGS))

# Figures of research/results, with page and picture in docs/tpu: an hour. ARGS=guards: what `make guards` compares.
compile-all: $(INSTALLED) $(BOTH_COMPILERS)
	$(PY) -m tpu.compiler.pages $(ARGS)

# Three test processes on two cores: those of the launcher mostly wait. Tests of a script, or else of a file, share what
# they have trained: see tests/conftest.py, which also brings the longest groups to the front.
SHARED_OUT := -n 3 --dist loadgroup --no-loadscope-reorder

# Compiling is most of what tests do. These flags take 15 to 35 % off the CPU time of those that compile much, and cost the
# trials nothing; the graphs are the same. Cut into pieces, a program would compile at once on cores that the other processes
# have, and take 13 % more of them. test-all compiles as users do.
test: export XLA_FLAGS ?= --xla_cpu_use_fusion_emitters=false --xla_backend_optimization_level=1 --xla_cpu_parallel_codegen_split_count=1
test: $(INSTALLED) $(WANDB)
	$(PY) -m pytest $(SHARED_OUT) -m 'not slow' $(ARGS)

# Each test compiles in a process of its own. None is skipped: the compiler is there. ARGS="-m ''" has those of test-all.
guards: $(INSTALLED) $(BOTH_COMPILERS)
	$(PY) -m pytest -n 2 --maxschedchunk 1 -m 'not long' tests/test_compile.py tests/test_libtpu.py $(ARGS)

test-all: $(INSTALLED) $(WANDB) $(FAIRSEQ)/.installed $(BOTH_COMPILERS)
	$(PY) -m pytest $(SHARED_OUT) $(ARGS)

# Plain PyTorch on the newest torch: with the files of tests that need no torch_xla, and the slow trials. Not in CI, where
# it would cost 7 GB and half an hour.
$(NEWEST_TORCH)/.installed: requirements.txt requirements-newest.txt
	$(call mark,$(NEWEST_TORCH))
	@echo 'installing the newest torch into $(NEWEST_TORCH): 7 GB'
	@$(PYTHON) -m venv $(NEWEST_TORCH)
	@$(call without_torch,requirements.txt,$(NEWEST_TORCH),requirements-newest.txt)
	touch $@

ON_NEWEST := $(foreach name,eager resnet encoders heads architectures layers vocabulary,tests/test_$(name).py)

test-newest: $(NEWEST_TORCH)/.installed
	$(NEWEST_TORCH)/bin/python -m pytest $(SHARED_OUT) -m 'not xla' $(ON_NEWEST) $(ARGS)

check-bench: check-no-device
	@test -n '$(filter $(BENCH),$(BENCHES))' || { echo "error: BENCH=$$BENCH is not known; BENCH is one of: $(BENCHES)" >&2; exit 2; }

bench: check-bench $(INSTALLED)
	$(PY) -m bench.$(BENCH) $(ARGS)

# fairseq's torch is that of $(VENV), by links: a second copy would take 7 GB. Links to torch's own folders, not to all of
# $(VENV), since fairseq imports torch_xla where it sees it.
$(FAIRSEQ)/.installed: SITE = lib/python3.11/site-packages
$(FAIRSEQ)/.installed: requirements-fairseq.txt | $(INSTALLED)
	@$(PY) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
		{ echo 'error: fairseq needs CPython 3.11, and $(VENV) has another; make clean, then PYTHON=python3.11 make fairseq' >&2; exit 2; }
	$(call mark,$(FAIRSEQ))
	@echo 'installing fairseq into $(FAIRSEQ)'
	@$(PY) -m venv $(FAIRSEQ)
	@$(call pip,$(FAIRSEQ)) --no-deps -r requirements-fairseq.txt
	ln -sfnt $(FAIRSEQ)/$(SITE) $(foreach folder,torch torchgen functorch nvidia triton,'$(abspath $(VENV))/$(SITE)/$(folder)')
	$(FAIRSEQ)/bin/python -W ignore -c 'import fairseq, torch; assert torch.__version__.startswith("2.9.0")'
	touch $@

fairseq: $(FAIRSEQ)/.installed

# Records again what fairseq computes, for the tests: tests/fairseq_reference/golden.
fairseq-golden: $(FAIRSEQ)/.installed
	$(FAIRSEQ)/bin/python tests/fairseq_reference/record.py $(ARGS)

# What lowers JAX's steps for research/jax_peers.py.
$(JAX)/.installed: requirements-jax.txt
	$(call mark,$(JAX))
	@echo 'installing JAX into $(JAX)'
	@$(PYTHON) -m venv $(JAX)
	@$(call pip,$(JAX)) -r requirements-jax.txt
	touch $@

jax: $(JAX)/.installed

$(BOARD)/.installed: requirements-board.txt
	$(call mark,$(BOARD))
	@echo 'installing TensorBoard into $(BOARD)'
	@$(PYTHON) -m venv $(BOARD)
	@$(call pip,$(BOARD)) -r requirements-board.txt
	touch $@

board: $(BOARD)/.installed
	@case "$${RUNS:-runs}" in *://*) ;; *) [ -d "$${RUNS:-runs}" ] || { \
		echo "error: RUNS=$${RUNS:-runs} is no folder; give that of your runs, or a URL such as gs://bucket/runs" >&2; exit 2; } ;; esac
	$(BOARD)/bin/tensorboard --logdir "$${RUNS:-runs}" --port $(or $(PORT),6006) $(ARGS)

lint: $(INSTALLED)
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .

# Environments of versions before the mark are known by their names here and by the stamp of their installation.
OWN := .venv .venv-eager .venv-tpu $(FAIRSEQ) $(JAX) $(NEWEST_TORCH) $(BOARD) $(LIBTPU)
CODE := train models data tpu bench research docs examples copied tests

clean:
	@for folder in '$(VENV)' $(filter-out .venv,$(OWN)); do \
		if [ -L "$$folder" ]; then \
			echo "kept $$folder: it is a link, which make has not made" >&2; \
		elif [ -e "$$folder/$(MARK)" ]; then \
			rm -rf "$$folder"; \
		elif [ -e "$$folder/.installed" ] && echo ' $(OWN) ' | grep -qF " $$folder "; then \
			rm -rf "$$folder"; \
		elif [ -e "$$folder" ]; then \
			echo "kept $$folder: make has not made it, or it would have $(MARK); remove it yourself" >&2; \
		fi; \
	done
	rm -rf .pytest_cache .ruff_cache __pycache__
	find $(CODE) -path '*/__pycache__/*.pyc' -type f -delete
	find $(CODE) -name __pycache__ -type d -empty -delete
