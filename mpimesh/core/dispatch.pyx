"""Dispatch of split arrays: what a rule has decided for a kind of call is looked up and done again.

A kind of call is a function, the specs of its split arrays (layout, shape and dtype, one object for equal ones), the exact types of
numbers among its operands, and its options. The rules, in `mpimesh/dtensor`, decide once for each; a call of a known kind that moves
nothing is: key, kernel on the blocks, new array. All else goes the rules' own way: what moves, what ranks may raise alone, compared
calls, floating-point errors that are raised, ranks without a block, and operands whose values count.
"""

cimport cython
cimport numpy as cnp
from cpython.dict cimport PyDict_GetItem
from cpython.list cimport PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongLongAndOverflow
from cpython.object cimport PyObject, PyTypeObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE

from mpimesh.core.pool cimport Pool

import operator
import warnings

import numpy
from numpy._core import umath

cnp.import_array()

cdef extern from "Python.h":
    int PyContextVar_Get(object, PyObject *, PyObject **) except -1
    void Py_DECREF(PyObject *)
    object PyObject_Vectorcall(object, PyObject **, size_t, PyObject *)

cdef extern from "numpy/arrayobject.h":
    object PyArray_Empty(int, cnp.npy_intp *, cnp.dtype, int)
    int PyArray_CopyInto(cnp.ndarray, cnp.ndarray) except -1

cdef enum: MOST_AXES = 8
cdef enum: MOST_ARGUMENTS = 12
cdef enum: MOST_SPECS = 2048
cdef enum: SMALL_BYTES = 32768  # the pool's largest part

MOST_ENTRIES = 2048
"""Most kinds of calls that are kept for a mesh."""
cdef Py_ssize_t _most_entries = MOST_ENTRIES

INTO = 0
"""A kernel that writes into the memory it gets as its last operand."""
MADE = 1
"""One whose result is the new block."""
COPY = 2
"""One that gives a view, of which the new block is a copy."""

cdef tuple _EMPTY = ()
cdef object _MISS = object()
cdef object _OUT = object()
cdef type _split = None  # the class of split arrays; set by `adopt`
cdef dict _planners = None
cdef type _array = numpy.ndarray
cdef object _getitem = operator.getitem, _ufunc = numpy.ufunc
cdef object _negative = numpy.negative
cdef object _positive = numpy.positive
cdef object _absolute = numpy.absolute
cdef object _invert = numpy.invert
cdef object _less = numpy.less
cdef object _less_equal = numpy.less_equal
cdef object _greater = numpy.greater
cdef object _greater_equal = numpy.greater_equal
cdef object _equal = numpy.equal
cdef object _not_equal = numpy.not_equal
cdef object _power = numpy.power
cdef object _divmod = numpy.divmod
cdef object _add = numpy.add
cdef object _subtract = numpy.subtract
cdef object _multiply = numpy.multiply
cdef object _matmul = numpy.matmul
cdef object _true_divide = numpy.true_divide
cdef object _floor_divide = numpy.floor_divide
cdef object _remainder = numpy.remainder
cdef object _left_shift = numpy.left_shift
cdef object _right_shift = numpy.right_shift
cdef object _bitwise_and = numpy.bitwise_and
cdef object _bitwise_xor = numpy.bitwise_xor
cdef object _bitwise_or = numpy.bitwise_or
cdef frozenset _numbers = frozenset(
    [bool, int, float, complex, *(numpy.dtype(char).type for char in "?bhilqBHILQefdgFDG")]
)


@cython.final
cdef class Spec:
    """Layout, shape and dtype of a split array: one object for all equal ones of a mesh.

    Attributes:
        plain: Whether its elements are numbers of NumPy's own, in the machine's byte order.
        partial: Whether it waits for a reduction.
    """

    cdef readonly object layout, shape, dtype
    cdef readonly bint plain, partial

    def __init__(self, layout, tuple shape not None, cnp.dtype dtype not None):
        self.layout, self.shape, self.dtype = layout, shape, dtype
        self.partial = bool(layout.partial_op)
        self.plain = dtype.isbuiltin == 1 and dtype.kind in "biufc" and len(shape) <= MOST_AXES


@cython.final
cdef class Entry:
    """What a rule has decided for a kind of call: which kernel works on the blocks, and what comes of it.

    Args:
        way: `INTO`, `MADE` or `COPY`.
        kernel: Called with the blocks, then `options`; for `INTO` the memory of the result stands among these as `Entry.OUT`.
        count: How many of the call's arguments are operands.
        spec: That of the result.
        local: The shape of this rank's block of it.
        options: The kernel's further arguments.
        names: Names of the last of these.
        cuts: For each operand the key that takes its part; None for all of it. Empty if all are whole.
        bring: Returns the blocks of all operands, which it gets in a tuple, where some have to move. Collective.
    """

    cdef object kernel, bring
    cdef tuple options, names, cuts
    cdef Spec spec
    cdef readonly object local
    cdef cnp.npy_intp dims[MOST_AXES]
    cdef int way, count, ndim, named
    cdef size_t nbytes
    cdef bint used

    OUT = _OUT

    def __init__(
        self,
        int way,
        kernel,
        int count,
        Spec spec not None,
        tuple local not None,
        tuple options=(),
        tuple names=(),
        tuple cuts=(),
        bring=None,
    ):
        cdef int axis
        if len(local) > MOST_AXES or count + len(options) > MOST_ARGUMENTS:
            raise ValueError("too many axes or arguments")
        self.way, self.kernel, self.count, self.spec, self.bring = way, kernel, count, spec, bring
        self.local, self.options, self.names, self.cuts, self.ndim = local, options, names, cuts, len(local)
        self.named = len(names)
        self.nbytes = spec.dtype.itemsize
        for axis in range(self.ndim):
            self.dims[axis] = local[axis]
            self.nbytes *= local[axis]

    cdef object empty(self, SplitArray me):
        """Return memory for a result."""
        cdef Pool pool = me._home.pool
        if self.nbytes > SMALL_BYTES:
            return me._mesh.shared_empty(self.local, self.spec.dtype)
        if pool is not None:
            made = pool.take(self.ndim, self.dims, self.spec.dtype, self.nbytes)
            if made is not None:
                return made
        Py_INCREF(self.spec.dtype)
        return PyArray_Empty(self.ndim, self.dims, self.spec.dtype, 0)

    cdef object run(self, SplitArray me, PyObject **operands, SplitArray into):
        """Do the call on the blocks of `operands`; return the result as a new array, or `into`."""
        cdef PyObject *blocks[MOST_ARGUMENTS]
        cdef list parts = None
        cdef object out = None, brought = None, made, one
        cdef int number, n = self.count
        if self.bring is not None:
            brought = self.bring(tuple([<object>operands[number] for number in range(n)]))
            for number in range(n):
                blocks[number] = PyTuple_GET_ITEM(brought, number)
        for number in range(0 if self.bring is not None else n):
            one = <object>operands[number]
            if type(one) is _split:
                one = (<SplitArray>one)._block
            if self.cuts and self.cuts[number] is not None:
                one = one[self.cuts[number]]
                if parts is None:
                    parts = []
                parts.append(one)  # so that it lives as long as the call
            blocks[number] = <PyObject *>one
        for option in self.options:
            if option is _OUT:
                out = self.empty(me) if into is None else into._block
                blocks[n] = <PyObject *>out
            else:
                blocks[n] = <PyObject *>option
            n += 1
        made = PyObject_Vectorcall(self.kernel, blocks, n - self.named, <PyObject *>self.names if self.named else NULL)
        if into is not None:
            return into
        if self.way == INTO_:
            made = out
        elif self.way == COPY_:
            out = self.empty(me)
            PyArray_CopyInto(<cnp.ndarray>out, <cnp.ndarray>made)
            made = out
        return _new(me._mesh, me._home, self.spec, made)


cdef enum: INTO_ = 0
cdef enum: COPY_ = 2


@cython.final
cdef class Dispatch:
    """The specs of the split arrays of a mesh, and what was decided for calls of their functions.

    Of the entries the oldest goes first, but for those that were used since they were last up: a loop over ``x[:, i]`` takes the
    place of no call that comes again.

    Args:
        active: Whether calls may go by what was decided; not where the ranks compare them.
        pool: Where small results lie; in ordinary memory if None.
    """

    cdef dict specs, entries
    cdef Pool pool
    cdef readonly bint active

    def __init__(self, bint active, Pool pool=None):
        self.specs, self.entries, self.active, self.pool = {}, {}, active, pool

    def __len__(self):
        """Return how many kinds of calls are known."""
        return len(self.entries)

    def close(self):
        """Let all calls go by their rules, which refuse what a closed mesh cannot do."""
        self.active = False
        self.entries.clear()

    cpdef Spec spec(self, layout, tuple shape, cnp.dtype dtype):
        """Return the spec of these, the same object for equal ones."""
        cdef PyObject *found
        if dtype.isbuiltin != 1:  # two that are equal may have other metadata
            return Spec(layout, shape, dtype)
        key = (layout, shape, dtype.num)
        found = PyDict_GetItem(self.specs, key)
        if found != NULL and (<Spec><object>found).dtype is dtype:
            return <Spec><object>found
        if len(self.specs) >= MOST_SPECS:
            del self.specs[next(iter(self.specs))]
        made = self.specs[key] = Spec(layout, shape, dtype)
        return made

    cdef Entry keep(self, tuple key, Entry entry):
        """Keep what was decided for a kind of call: an entry, or None if its rule has to do it each time."""
        cdef dict entries = self.entries
        cdef Entry old
        while len(entries) >= _most_entries:
            oldest = next(iter(entries))
            old = entries.pop(oldest)
            if not old.used:
                break
            old.used = False
            entries[oldest] = old
        entries[key] = entry = Entry.__new__(Entry) if entry is None else entry
        return entry


def adopt(type split not None, dict planners not None):
    """Make split arrays instances of `split`; `planners` has for functions what decides on their calls, and how many of
    their arguments are operands.

    A planner gets the function, its arguments, its options and what the result goes into, or None. It returns an entry, or None if
    the rule has to do such calls each time.
    """
    global _split, _planners
    _split, _planners = split, planners


# -- errors of floats ------------------------------------------------------------------------------------

cdef object _errors = umath._extobj_contextvar
cdef object _seen_errors = None  # the settings that were looked at last
cdef bint _warn_errors, _loud_errors  # whether they warn, and whether they raise or call
cdef list _seen_filters = []
cdef bint _raising_filters = False
cdef dict _warnings = warnings.__dict__
cdef tuple _ABOVE = RuntimeWarning.__mro__


cpdef bint floats_are_quiet() except -1:
    """Tell whether errors of floats are raised nowhere: neither by errstate nor as warnings, nor handed to a callback."""
    cdef PyObject *found
    global _seen_errors, _warn_errors, _loud_errors
    PyContextVar_Get(_errors, NULL, &found)
    settings = <object>found
    Py_DECREF(found)
    if settings is not _seen_errors:
        modes = numpy.geterr().values()
        _warn_errors = "warn" in modes
        _loud_errors = "raise" in modes or "call" in modes
        _seen_errors = settings
    if _loud_errors:
        return False
    return not (_warn_errors and warnings_raise())


cpdef bint warnings_raise() except -1:
    """Tell whether a warning of NumPy about floats is raised as an error."""
    global _seen_filters, _raising_filters
    cdef list filters = _warnings["filters"]
    cdef Py_ssize_t number, count = PyList_GET_SIZE(filters)
    cdef bint same = count == PyList_GET_SIZE(_seen_filters)
    if same:
        for number in range(count):
            if PyList_GET_ITEM(filters, number) != PyList_GET_ITEM(_seen_filters, number):
                same = False
                break
    if not same:
        _seen_filters = list(filters)
        _raising_filters = False
        for action, message, category, _, _ in filters:  # the first one that fits counts
            if category in _ABOVE and (message is None or message.match("overflow encountered in add")):
                _raising_filters = action == "error"
                break
    return _raising_filters


# -- keys --------------------------------------------------------------------------------------------------

cdef inline object _operand_part(SplitArray me, object x):
    """Return what a key has of an operand; None if its values, or other things, count."""
    cdef SplitArray other
    cdef int overflow = 0
    if type(x) is _split:
        other = <SplitArray>x
        if other._home is not me._home or not other._spec.plain or not cnp.PyArray_CheckExact(other._block):
            return None
        return other._spec
    if type(x) is _array:
        return _array_part(<cnp.ndarray>x)
    if type(x) not in _numbers:
        return None
    if type(x) is int:
        PyLong_AsLongLongAndOverflow(x, &overflow)
        if overflow:  # its dtype would be another one
            return None
    return type(x)


cdef object _array_part(cnp.ndarray x):
    """Return what a key has of a plain array, which all ranks have alike: its shape and dtype."""
    cdef cnp.dtype dtype = x.dtype
    cdef int axis, count = cnp.PyArray_NDIM(x)
    if not 0 < count <= MOST_AXES or dtype.isbuiltin != 1 or dtype.kind not in "biufc":
        return None
    return dtype.num, *[cnp.PyArray_DIM(x, axis) for axis in range(count)]


cdef bint _add_option(list parts, object x) except -1:
    """Add to a key what it has of an option; return whether it can."""
    kind = type(x)
    if x is None or x is Ellipsis:
        parts.append(x)
    elif kind is int or kind is bool or kind is str:
        parts.append(kind)
        parts.append(x)
    elif kind is slice:
        parts.append(slice)
        return _add_option(parts, x.start) and _add_option(parts, x.stop) and _add_option(parts, x.step)
    elif kind is tuple:
        parts.append(tuple)
        parts.append(len(<tuple>x))
        for one in <tuple>x:
            if not _add_option(parts, one):
                return False
    else:
        return False
    return True


cdef inline bint _may_go(SplitArray me) except -1:
    """Tell whether calls of an array's functions may go by what was decided."""
    return type(me) is _split and me._block is not None and me._home.active and floats_are_quiet()


cdef object _known(SplitArray me, tuple key, PyObject **operands, SplitArray into):
    """Do a call of a known kind that moves nothing; else return `_MISS`."""
    cdef PyObject *found = PyDict_GetItem(me._home.entries, key)
    cdef Entry entry
    if found == NULL:
        return _MISS
    entry = <Entry>found
    entry.used = True
    return _MISS if entry.kernel is None else entry.run(me, operands, into)


cdef object _done(SplitArray me, object planner, tuple key, object function, tuple args, dict options, SplitArray into):
    """Do a call by its entry, which is made if the kind of call is new; `_MISS` if its rule has to do it."""
    cdef PyObject *found = PyDict_GetItem(me._home.entries, key)
    cdef PyObject *operands[MOST_ARGUMENTS]
    cdef Entry entry
    cdef int number
    if found == NULL:
        entry = me._home.keep(key, planner(function, args, options, into))
    else:
        entry = <Entry>found
        entry.used = True
    if entry.kernel is None:
        return _MISS
    for number in range(entry.count):
        operands[number] = PyTuple_GET_ITEM(args, number)
    return entry.run(me, operands, into)


cdef inline object _unary(object ufunc, SplitArray me):
    cdef PyObject *operands[1]
    if _may_go(me):
        operands[0] = <PyObject *>me
        part = _operand_part(me, me)
        if part is not None:
            made = _known(me, (ufunc, part), operands, None)
            if made is not _MISS:
                return made
    return ufunc(me)


cdef inline object _binary_known(object ufunc, SplitArray me, object a, object b, SplitArray into):
    """Do an operator by what was decided; else return `_MISS`."""
    cdef PyObject *operands[2]
    if not _may_go(me):
        return _MISS
    first = _operand_part(me, a)
    if first is None:
        return _MISS
    second = first if b is a else _operand_part(me, b)
    if second is None:
        return _MISS
    operands[0], operands[1] = <PyObject *>a, <PyObject *>b
    key = (ufunc, first, second) if into is None else (ufunc, first, second, _OUT, into._spec)
    return _known(me, key, operands, into)


cdef inline object _binary(object ufunc, SplitArray me, object a, object b):
    """Do an operator, as NumPy's mixin of operators has it."""
    made = _binary_known(ufunc, me, a, b, None)
    if made is not _MISS:
        return made
    if _is_foreign(b if a is me else a):
        return NotImplemented
    return ufunc(a, b)


cdef inline object _in_place(object ufunc, SplitArray me, object b):
    made = _binary_known(ufunc, me, me, b, me)
    return ufunc(me, b, out=(me,)) if made is _MISS else made


cdef bint _is_foreign(object other) except -1:
    """Tell whether an operand leaves operators to its own methods."""
    if type(other) is _split or type(other) in _numbers or type(other) is _array:
        return False
    return getattr(other, "__array_ufunc__", 0) is None


# -- the array ---------------------------------------------------------------------------------------------

cdef inline object _new(object mesh, Dispatch home, Spec spec, object block):
    cdef SplitArray made = (<PyTypeObject *>_split).tp_new(_split, <PyObject *>_EMPTY, NULL)
    made._mesh, made._home, made._spec, made._block = mesh, home, spec, block
    return made


cdef class SplitArray:
    """The block, spec and operators of a split array; see :class:`mpimesh.DTensor`, the only class of them."""

    cdef object __weakref__
    cdef readonly object _mesh, _block
    cdef readonly Spec _spec
    cdef Dispatch _home
    cdef public object _origin

    def _hold(self, mesh, Dispatch home not None, layout, tuple shape, dtype, block):
        """Take a block as it is."""
        self._mesh, self._home, self._block = mesh, home, block
        self._spec = home.spec(layout, shape, dtype)

    @classmethod
    def _of_block(cls, mesh, layout, tuple shape not None, dtype, block):
        """Return the array of a block that is known to be the right one. Local."""
        cdef Dispatch home = mesh._core.dispatch
        return _new(mesh, home, home.spec(layout, shape, dtype), block)

    def __array_ufunc__(self, ufunc, method, *args, **kwargs):
        """Do a ufunc of NumPy, or one of its methods, such as ``np.add.reduce``."""
        cdef SplitArray into = None
        cdef PyObject *found
        cdef list parts
        if method == "__call__" and _may_go(self) and len(args) == ufunc.nin <= 4:
            found = PyDict_GetItem(_planners, _ufunc if ufunc.signature is None else ufunc)
            parts = [ufunc]
            for one in args:
                parts.append(_operand_part(self, one))
            if kwargs:
                into = _only_out(kwargs, self)
                parts.append(_OUT)
                parts.append(None if into is None else into._spec)
            if found != NULL and None not in parts:
                made = _done(self, (<tuple>found)[0], tuple(parts), ufunc, args, {}, into)
                if made is not _MISS:
                    return made
        return self._do_ufunc(ufunc, method, args, kwargs)

    def __array_function__(self, function, types, args, kwargs):
        """Do a function of NumPy by the rule that split arrays have for it.

        One without a rule works on whole arrays: where all ranks have them, or may gather them.
        """
        made = self._fast(function, args, kwargs)
        return self._do_function(function, types, args, kwargs) if made is _MISS else made

    cdef object _fast(self, object function, object args, dict kwargs):
        """Do a function by what was decided, or is to be decided now; else return `_MISS`."""
        cdef PyObject *found
        cdef list parts
        cdef Py_ssize_t operands
        found = PyDict_GetItem(_planners, function)
        if found == NULL or not _may_go(self):
            return _MISS
        planner, operands = <tuple>found
        if len(args) < operands:
            return _MISS
        parts = [function]
        for number, one in enumerate(args):
            if number < operands:
                part = _operand_part(self, one)
                if part is None:
                    return _MISS
                parts.append(part)
            elif not _add_option(parts, one):
                return _MISS
        for name, one in kwargs.items():
            parts.append(name)
            if not _add_option(parts, one):
                return _MISS
        return _done(self, planner, tuple(parts), function, tuple(args), kwargs, None)

    def _call(self, function, *args, **options):
        """Call a function, of NumPy or another."""
        made = self._fast(function, args, options)
        return function(*args, **options) if made is _MISS else made

    def __getitem__(self, key):
        """Return a part of the array, as a new one."""
        made = self._fast(_getitem, (self, key), {})
        return self._do_item(key) if made is _MISS else made

    # -- operators, as NumPy's mixin has them ----------------------------------------------------

    def __lt__(self, other):
        return _binary(_less, self, self, other)

    def __le__(self, other):
        return _binary(_less_equal, self, self, other)

    def __gt__(self, other):
        return _binary(_greater, self, self, other)

    def __ge__(self, other):
        return _binary(_greater_equal, self, self, other)

    def __eq__(self, other):
        made = _binary_known(_equal, self, self, other, None)
        return self._compare(_equal, other) if made is _MISS else made

    def __ne__(self, other):
        made = _binary_known(_not_equal, self, self, other, None)
        return self._compare(_not_equal, other) if made is _MISS else made

    def __add__(self, other):
        return _binary(_add, self, self, other)

    def __radd__(self, other):
        return _binary(_add, self, other, self)

    def __iadd__(self, other):
        return _in_place(_add, self, other)

    def __sub__(self, other):
        return _binary(_subtract, self, self, other)

    def __rsub__(self, other):
        return _binary(_subtract, self, other, self)

    def __isub__(self, other):
        return _in_place(_subtract, self, other)

    def __mul__(self, other):
        return _binary(_multiply, self, self, other)

    def __rmul__(self, other):
        return _binary(_multiply, self, other, self)

    def __imul__(self, other):
        return _in_place(_multiply, self, other)

    def __matmul__(self, other):
        return _binary(_matmul, self, self, other)

    def __rmatmul__(self, other):
        return _binary(_matmul, self, other, self)

    def __imatmul__(self, other):
        return _in_place(_matmul, self, other)

    def __truediv__(self, other):
        return _binary(_true_divide, self, self, other)

    def __rtruediv__(self, other):
        return _binary(_true_divide, self, other, self)

    def __itruediv__(self, other):
        return _in_place(_true_divide, self, other)

    def __floordiv__(self, other):
        return _binary(_floor_divide, self, self, other)

    def __rfloordiv__(self, other):
        return _binary(_floor_divide, self, other, self)

    def __ifloordiv__(self, other):
        return _in_place(_floor_divide, self, other)

    def __mod__(self, other):
        return _binary(_remainder, self, self, other)

    def __rmod__(self, other):
        return _binary(_remainder, self, other, self)

    def __imod__(self, other):
        return _in_place(_remainder, self, other)

    def __lshift__(self, other):
        return _binary(_left_shift, self, self, other)

    def __rlshift__(self, other):
        return _binary(_left_shift, self, other, self)

    def __ilshift__(self, other):
        return _in_place(_left_shift, self, other)

    def __rshift__(self, other):
        return _binary(_right_shift, self, self, other)

    def __rrshift__(self, other):
        return _binary(_right_shift, self, other, self)

    def __irshift__(self, other):
        return _in_place(_right_shift, self, other)

    def __and__(self, other):
        return _binary(_bitwise_and, self, self, other)

    def __rand__(self, other):
        return _binary(_bitwise_and, self, other, self)

    def __iand__(self, other):
        return _in_place(_bitwise_and, self, other)

    def __xor__(self, other):
        return _binary(_bitwise_xor, self, self, other)

    def __rxor__(self, other):
        return _binary(_bitwise_xor, self, other, self)

    def __ixor__(self, other):
        return _in_place(_bitwise_xor, self, other)

    def __or__(self, other):
        return _binary(_bitwise_or, self, self, other)

    def __ror__(self, other):
        return _binary(_bitwise_or, self, other, self)

    def __ior__(self, other):
        return _in_place(_bitwise_or, self, other)

    def __pow__(self, other, modulo):
        return NotImplemented if modulo is not None else _binary(_power, self, self, other)

    def __rpow__(self, other, modulo):
        return NotImplemented if modulo is not None else _binary(_power, self, other, self)

    def __ipow__(self, other):
        return _in_place(_power, self, other)

    def __divmod__(self, other):
        return _binary(_divmod, self, self, other)

    def __rdivmod__(self, other):
        return _binary(_divmod, self, other, self)

    def __neg__(self):
        return _unary(_negative, self)

    def __pos__(self):
        return _unary(_positive, self)

    def __abs__(self):
        return _unary(_absolute, self)

    def __invert__(self):
        return _unary(_invert, self)

cdef SplitArray _only_out(dict kwargs, SplitArray me):
    """Return the array that a ufunc is to write into, if that is all that is asked for; else None."""
    cdef SplitArray into
    out = kwargs.get("out") if len(kwargs) == 1 else None
    if type(out) is not tuple or len(<tuple>out) != 1 or type((<tuple>out)[0]) is not _split:
        return None
    into = <SplitArray>(<tuple>out)[0]
    return into if _operand_part(me, into) is not None else None
