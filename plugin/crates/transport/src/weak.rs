//! Collections of weak references. Dead ones are removed when the length has doubled, so that each
//! insertion costs the same on average, however many there are.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::{Arc, Weak};

/// Length below which dead references are left in place.
const MIN_SWEPT: usize = 32;

/// A list of objects that may be dropped elsewhere.
#[derive(Debug)]
pub struct WeakList<T: ?Sized> {
    all: Vec<Weak<T>>,
    next_sweep: usize,
    #[cfg(test)]
    visited: usize,
}

impl<T: ?Sized> Default for WeakList<T> {
    fn default() -> Self {
        Self {
            all: Vec::new(),
            next_sweep: MIN_SWEPT,
            #[cfg(test)]
            visited: 0,
        }
    }
}

impl<T: ?Sized> WeakList<T> {
    /// Adds an object.
    pub fn push(&mut self, object: Weak<T>) {
        if self.all.len() >= self.next_sweep {
            #[cfg(test)]
            {
                self.visited += self.all.len();
            }
            self.all.retain(|object| object.strong_count() > 0);
            self.next_sweep = MIN_SWEPT.max(2 * self.all.len());
        }
        self.all.push(object);
    }

    /// The objects that are still there.
    pub fn live(&self) -> impl Iterator<Item = Arc<T>> {
        self.all.iter().filter_map(Weak::upgrade)
    }
}

/// Objects by key, which may be dropped elsewhere.
#[derive(Debug)]
pub(crate) struct WeakMap<K, T> {
    all: HashMap<K, Weak<T>>,
    next_sweep: usize,
}

impl<K, T> Default for WeakMap<K, T> {
    fn default() -> Self {
        Self { all: HashMap::new(), next_sweep: MIN_SWEPT }
    }
}

impl<K: Eq + Hash, T> WeakMap<K, T> {
    pub(crate) fn insert(&mut self, key: K, object: &Arc<T>) {
        if self.all.len() >= self.next_sweep {
            self.all.retain(|_, object| object.strong_count() > 0);
            self.next_sweep = MIN_SWEPT.max(2 * self.all.len());
        }
        self.all.insert(key, Arc::downgrade(object));
    }

    /// The object with this key, if it is still there.
    pub(crate) fn live(&self, key: &K) -> Option<Arc<T>> {
        self.all.get(key)?.upgrade()
    }

    /// Whether the key is in use, or was not long ago.
    pub(crate) fn is_known(&self, key: &K) -> bool {
        self.all.contains_key(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weak_list_visits_few_objects_per_insertion() {
        const COUNT: usize = 10_000;
        let mut list = WeakList::default();
        let objects: Vec<Arc<usize>> = (0..COUNT).map(Arc::new).collect();
        objects.iter().for_each(|object| list.push(Arc::downgrade(object)));
        assert!(list.visited <= 2 * COUNT, "{} for {COUNT} insertions", list.visited);
        assert!(list.live().eq(objects.iter().cloned()));
    }

    #[test]
    fn weak_collections_forget_the_dead() {
        let (mut list, mut map) = (WeakList::default(), WeakMap::default());
        let kept = Arc::new(0);
        list.push(Arc::downgrade(&kept));
        map.insert(0, &kept);
        for number in 1..1000 {
            let object = Arc::new(number);
            list.push(Arc::downgrade(&object));
            map.insert(number, &object);
            assert!(list.all.len() <= MIN_SWEPT + 1 && map.all.len() <= MIN_SWEPT + 1);
        }
        assert_eq!((list.live().count(), map.live(&0), map.live(&999)), (1, Some(kept), None));
        assert!(map.is_known(&0) && !map.is_known(&1));
    }
}
